import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


class LoraLinear(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


def constant_with_warmup(optimizer, num_warmup_steps):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, num_warmup_steps)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--lr_warmup_steps", type=int, default=8)
    parser.add_argument("--max_train_steps", type=int, default=24)
    parser.add_argument("--train_batch_size", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(LoraLinear(nn.Linear(16, 32)), nn.GELU(), LoraLinear(nn.Linear(32, 16)))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    lr_scheduler = constant_with_warmup(
        optimizer,
        num_warmup_steps=args.lr_warmup_steps,
    )
    g = torch.Generator().manual_seed(400 + rank)
    for step in range(args.max_train_steps):
        x = torch.randn(args.train_batch_size, 16, generator=g)
        loss = nn.functional.mse_loss(model(x), x.roll(1, -1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        if rank == 0 and (step + 1) % 6 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} lr {lr_scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
