"""Denoising diffusion on small images with EMA weights; continues from its checkpoint with --resume."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIDE, STEPS = 8, 50
BETAS = torch.linspace(1e-3, 0.15, STEPS)
ALPHA_BAR = torch.cumprod(1 - BETAS, 0)


def bars(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = -torch.ones(n, 1, SIDE, SIDE)
    for k in range(n):
        where, upright = int(torch.randint(SIDE, (1,), generator=g)), bool(torch.rand(1, generator=g) < 0.5)
        if upright:
            x[k, 0, :, where] = 1.0
        else:
            x[k, 0, where, :] = 1.0
    return x + 0.05 * torch.randn(x.shape, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.mid = nn.ModuleList(nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 5, padding=2))
                                 for _ in range(2))
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


def noisy(x, t, noise):
    a = ALPHA_BAR[t][:, None, None, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


@torch.no_grad()
def validate(model, loader):
    """Time steps and noise of the validation images are drawn once, with the data."""
    sums = torch.zeros(2)
    for x, t, noise in loader:
        sums += torch.tensor([F.mse_loss(model(noisy(x, t, noise), t), noise, reduction="sum").item(), float(x.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="out_diffusion")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train = TensorDataset(bars(640, 1))
    g = torch.Generator().manual_seed(5)
    val = TensorDataset(bars(83, 2), torch.randint(STEPS, (83,), generator=g), torch.randn(83, 1, SIDE, SIDE, generator=g))
    sampler = DistributedSampler(train, shuffle=True, seed=70)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=32)

    torch.manual_seed(70)
    net = Denoiser()
    ema = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    start = 0
    path = os.path.join(args.out, "last.pt")
    if args.resume and os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        net.load_state_dict(state["net"])
        ema.load_state_dict(state["ema"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"] + 1
    model = DDP(net)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(10_000 * (epoch + 1) + rank)  # noise of this epoch and rank
        log = torch.zeros(2)
        for (x,) in loader:
            t, noise = torch.randint(STEPS, (len(x),)), torch.randn_like(x)
            loss = F.mse_loss(model(noisy(x, t, noise), t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), net.parameters()):
                    e.lerp_(p, 0.05)
            log += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(log)
        val_mse = validate(ema, val_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {log[0] / log[1]:.4f} ema val {val_mse:.4f}")
            os.makedirs(args.out, exist_ok=True)
            torch.save({"net": net.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
