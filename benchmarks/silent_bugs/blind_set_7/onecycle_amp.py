"""Residual MLP on spectra, OneCycle schedule, bf16 autocast."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def spectra(n, seed, classes=15, length=64):
    g = torch.Generator().manual_seed(seed)
    lines = torch.randn(classes, length, generator=torch.Generator().manual_seed(123))
    y = torch.randint(0, classes, (n,), generator=g)
    gain = 0.5 + torch.rand(n, 1, generator=g)
    return TensorDataset(gain * lines[y] + 2.0 * torch.randn(n, length, generator=g), y)


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class SpectraNet(nn.Module):
    def __init__(self, length=64, width=96, depth=3, classes=15):
        super().__init__()
        self.stem = nn.Linear(length, width)
        self.blocks = nn.Sequential(*[ResBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x).argmax(1)
    result = torch.tensor([(pred == y).sum().item(), len(y)])
    dist.all_reduce(result)
    model.train()
    return result[0].item() / result[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per GPU")
    parser.add_argument("--max-lr", type=float, default=0.08)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)

    train_set = spectra(1280, seed=1)
    val_set = spectra(333, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=77)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(SpectraNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr, momentum=0.9, weight_decay=5e-4)
    steps_per_epoch = len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch, pct_start=0.25)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(())
        for x, y in train_loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (world * len(train_loader))
        acc = accuracy(model, val_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  lr {scheduler.get_last_lr()[0]:.5f}  train loss {train_loss:.4f}  val acc {acc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
