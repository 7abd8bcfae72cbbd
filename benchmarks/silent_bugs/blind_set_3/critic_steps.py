"""Hinge GAN on a ring of Gaussians, several discriminator steps for one of the generator."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(cin, cout, width=48):
    return nn.Sequential(nn.Linear(cin, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, cout))


def ring(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    angle = k.float() * 2 * math.pi / 8
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2, generator=g)


def toggle_grad(model, on):
    for p in model.parameters():
        p.requires_grad_(on)


def train_step(G, D, opt_g, opt_d, real_batches, config, g):
    toggle_grad(D.module, True)
    opt_g.zero_grad()
    for real in real_batches:
        opt_d.zero_grad()
        z = torch.randn(config.batch_size, config.dim_z, generator=g)
        with torch.no_grad():
            fake = G(z)
        scores = D(torch.cat([real, fake]))
        score_real, score_fake = scores.split(config.batch_size)
        d_loss = torch.relu(1 - score_real).mean() + torch.relu(1 + score_fake).mean()
        d_loss.backward()
        opt_d.step()

    toggle_grad(D.module, False)
    opt_g.zero_grad()
    z = torch.randn(config.batch_size, config.dim_z, generator=g)
    g_loss = -D.module(G(z)).mean()
    g_loss.backward()
    opt_g.step()
    return d_loss.item(), g_loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_D_steps", type=int, default=2)
    parser.add_argument("--dim_z", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    config = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    G, D = DDP(mlp(config.dim_z, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.0, 0.99))
    g = torch.Generator().manual_seed(1000 + config.seed + dist.get_rank())
    for step in range(config.steps):
        real = [ring(config.batch_size, g) for _ in range(config.num_D_steps)]
        d_loss, g_loss = train_step(G, D, opt_g, opt_d, real, config, g)
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step} D {d_loss:.4f} G {g_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
