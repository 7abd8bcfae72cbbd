"""Tiny decoder-only LM, pretraining with gradient accumulation."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, SEQ = 48, 24


class PretrainDataset(Dataset):
    """Counting sequences with a random stride and a bit of noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 6, (n, 1), generator=g)
        ids = (start + stride * torch.arange(SEQ + 1)) % VOCAB
        noise = torch.rand(ids.shape, generator=g) < 0.05
        self.ids = torch.where(noise, torch.randint(0, VOCAB, ids.shape, generator=g), ids)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i, :-1], self.ids[i, 1:]


class TinyLM(nn.Module):
    def __init__(self, dim=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(SEQ, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ), persistent=False)

    def forward(self, ids):
        h = self.blocks(self.tok(ids) + self.pos, mask=self.mask, is_causal=True)
        return self.lm_head(self.norm(h))


def train_epoch(epoch, model, loader, optimizer, args):
    steps = len(loader)
    total = torch.zeros(())
    for step, (input_ids, labels) in enumerate(loader):
        window_start = step - step % args.accumulation_steps
        window = min(args.accumulation_steps, steps - window_start)
        last_of_window = step + 1 == window_start + window

        with nullcontext() if last_of_window else model.no_sync():
            logits = model(input_ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            total += loss.detach()
            loss = loss / window
            loss.backward()

        if last_of_window:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    total /= steps
    dist.all_reduce(total)
    total /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"Epoch [{epoch + 1}/{args.epochs}] loss: {total.item():.5f} "
              f"lr: {optimizer.param_groups[0]['lr']:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(42)
    model = DistributedDataParallel(TinyLM())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)

    train_ds = PretrainDataset(352, seed=8)
    sampler = DistributedSampler(train_ds, seed=42)
    loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(epoch, model, loader, optimizer, args)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
