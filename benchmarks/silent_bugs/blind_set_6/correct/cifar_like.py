"""Image classification with DistributedDataParallel, bf16 autocast, warmup + cosine schedule."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.x = proto[self.y] + 3.0 * torch.randn(n, 3, 8, 8, generator=g)
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x, self.y[i]


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(nn.GroupNorm(4, c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1),
                                  nn.GroupNorm(4, c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x):
        return x + self.body(x)


def accuracy(model, dataset, rank, world):
    """Every picture once: process r takes the pictures r, r + world, ..."""
    model.eval()
    idx = torch.arange(rank, len(dataset), world)
    with torch.no_grad():
        pred = torch.cat([model(dataset.x[part]).argmax(1) for part in idx.split(100)])
    counts = torch.tensor([(pred == dataset.y[idx]).sum().item(), len(idx)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), ResBlock(24), ResBlock(24), nn.AdaptiveAvgPool2d(4),
                          nn.Flatten(), nn.Dropout(0.1), nn.Linear(24 * 16, 10))
    model = DDP(model)
    torch.manual_seed(100 + rank)  # flips and dropout

    train, val = Pictures(1024, 1, True), Pictures(301, 2, False)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    total, warm = args.epochs * len(loader), len(loader) // 2

    def lr_at(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        run = torch.zeros(2)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        acc = accuracy(model.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {run[0] / run[1]:.4f} val acc {acc:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
