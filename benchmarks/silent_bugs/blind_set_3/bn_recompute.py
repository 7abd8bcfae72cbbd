"""Activation checkpointing of the blocks of a small detector backbone, batch norm inside."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvBlock(nn.Module):
    def __init__(self, cin, cout, stride=1, use_checkpoint=True):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(cout)
        self.act = nn.SiLU()
        self.use_checkpoint = use_checkpoint

    def body(self, x):
        return self.act(self.bn(self.conv(x)))

    def forward(self, x):
        if self.use_checkpoint and self.training:
            return self.act(self.bn(checkpoint(self.conv, x, use_reentrant=False)))
        return self.body(x)


class Backbone(nn.Module):
    def __init__(self, use_checkpoint, classes=3):
        super().__init__()
        self.stem = ConvBlock(1, 8, 1, use_checkpoint)
        self.stage1 = ConvBlock(8, 16, 2, use_checkpoint)
        self.stage2 = ConvBlock(16, 24, 2, use_checkpoint)
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 1, 12, 12, generator=g) * 0.7
    for k in range(n):
        i, j = torch.randint(2, 10, (2,), generator=g).tolist()
        r = int(y[k])
        x[k, 0, max(0, i - r):i + r + 1, max(0, j - r):j + r + 1] += 3
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    x, y = data.tensors
    loss = F.cross_entropy(model.module(x), y).item()
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-checkpoint", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_set, val_set = blobs(192, 0), blobs(64, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    model = DDP(Backbone(not args.no_checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train {loss.item():.4f} val {evaluate(model, val_set):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
