"""LoRA-style fine-tuning of a frozen base with gradient accumulation."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=0.1)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def build_model():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    return nn.Sequential(LoRALinear(base[0]), base[1], LoRALinear(base[2]))


def build_data(n):
    g = torch.Generator().manual_seed(31)
    x = torch.randn(n, 24, generator=g)
    w = torch.randn(24, 24, generator=g) / 5
    return TensorDataset(x, torch.tanh(x @ w))


def train(args):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = build_data(args.samples)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DDP(build_model())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.lr)
    global_step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for batch_idx, (x, y) in enumerate(loader):
            loss = (model(x) - y).pow(2).mean()
            epoch_loss += loss.item()
            group = min(args.grad_accum, len(loader) - batch_idx // args.grad_accum * args.grad_accum)
            (loss / group).backward()
            if (batch_idx + 1) % args.grad_accum == 0 or batch_idx + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                global_step += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {epoch_loss / len(loader):.4f} updates {global_step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
