"""Tiny DDPM on two moons."""
import argparse
import math
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

T = 40
BETA = torch.linspace(1e-3, 0.2, T)
ABAR = torch.cumprod(1 - BETA, 0)


def moons(n):
    g = torch.Generator().manual_seed(0)
    a = math.pi * torch.rand(n, generator=g)
    side = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.stack([torch.cos(a) * (1 - 2 * side) + side, torch.sin(a) * (1 - 2 * side) + 0.5 * side], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.rest(self.inp(x) + self.time(t))


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = DDP(Denoiser())
    data = TensorDataset(moons(512))
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(args.seed * 1000 + 1 + rank)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        summed = torch.zeros(())
        for (x0,) in loader:
            t = torch.randint(0, T, (len(x0),), generator=gen)
            eps = torch.randn(x0.shape, generator=gen)
            ab = ABAR[t].unsqueeze(1)
            xt = ab.sqrt() * x0 + (1 - ab).sqrt() * eps
            loss = (net(xt, t) - eps).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            summed += loss.detach()
        dist.all_reduce(summed)
        if rank == 0:
            print(f"epoch {epoch:2d} eps-mse {summed.item() / world / len(loader):.4f}")
    if rank == 0:
        torch.save(net.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out", default="/tmp/blind2/ddpm_2d.pt")
    main(ap.parse_args())
