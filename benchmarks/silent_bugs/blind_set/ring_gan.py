"""GAN on the ring of eight gaussians."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, z_dim, hidden):
        super().__init__()
        self.z_dim = z_dim
        self.net = nn.Sequential(
            nn.Linear(z_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def forward(self, z):
        return self.net(z)

    def sample(self, n):
        return self.net(torch.randn(n, self.z_dim))


class Discriminator(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def real_batch(n):
    k = torch.randint(0, 8, (n,))
    centers = torch.stack([torch.cos(k * math.pi / 4), torch.sin(k * math.pi / 4)], 1) * 2
    return centers + 0.05 * torch.randn(n, 2)


def set_grad(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def get_args():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--z-dim", type=int, default=8)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--lr-g", type=float, default=1e-3)
    ap.add_argument("--lr-d", type=float, default=2e-3)
    ap.add_argument("--print-every", type=int, default=50)
    return ap.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(3)
    G = DDP(Generator(args.z_dim, args.hidden))
    D = DDP(Discriminator(args.hidden))
    opt_g = torch.optim.Adam(G.parameters(), lr=args.lr_g, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=args.lr_d, betas=(0.5, 0.999))
    torch.manual_seed(1000 + rank)

    for step in range(1, args.steps + 1):
        # discriminator
        set_grad(D.module, True)
        real = real_batch(args.batch)
        with torch.no_grad():
            fake = G.module.sample(args.batch)
        scores = D(torch.cat([real, fake]))
        s_real, s_fake = scores.split(args.batch)
        loss_d = F.softplus(-s_real).mean() + F.softplus(s_fake).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        # generator
        set_grad(D.module, False)
        fake = G(torch.randn(args.batch, args.z_dim))
        loss_g = F.softplus(-D.module(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        if step % args.print_every == 0:
            both = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(both)
            both /= dist.get_world_size()
            if rank == 0:
                print(f"step {step}: D {both[0]:.4f}  G {both[1]:.4f}")

    if rank == 0:
        with torch.no_grad():
            radius = G.module.sample(512).norm(dim=1)
        print(f"sample radius {radius.mean():.3f} +- {radius.std():.3f} (data: 2.00)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
