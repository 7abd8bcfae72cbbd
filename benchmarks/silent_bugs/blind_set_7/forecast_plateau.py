"""Forecasting with a GRU; the learning rate falls when the validation error stops improving."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PAST, AHEAD = 30, 6


def series(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(PAST + AHEAD, dtype=torch.float32)
    period = 6 + 12 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    trend = 0.04 * torch.randn(n, 1, generator=g)
    x = torch.sin(2 * math.pi * t / period + phase) + trend * t
    x = x + 0.15 * torch.randn(x.shape, generator=g)
    return TensorDataset(x[:, :PAST, None], x[:, PAST:])


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, AHEAD)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1])


@torch.no_grad()
def validation_mse(model, loader):
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        sums[0] += F.mse_loss(model(x), y, reduction="sum").double()
        sums[1] += y.numel()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(epochs=16):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = series(800, 1), series(161, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=64)
    torch.manual_seed(0)
    model = DDP(Forecaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=2)
    best = float("inf")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        val_loss = validation_mse(model.module, val_loader)
        lr_scheduler.step(val_loss)
        if rank == 0:
            if val_loss < best:
                os.makedirs("out_forecast", exist_ok=True)
                torch.save(model.module.state_dict(), "out_forecast/best.pt")
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch} train {total[0] / total[1]:.4f} val {val_loss:.5f} lr {lr:.2e}")
        best = min(best, val_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
