"""GAN on a two-dimensional distribution, generator and discriminator both under DDP."""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LATENT = 8


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = math.pi * torch.rand(n, generator=g)
    side = (torch.rand(n, generator=g) < 0.5).float()
    x = torch.stack([torch.cos(t) * (1 - 2 * side) + side, torch.sin(t) * (1 - 2 * side) + 0.5 * side], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


@torch.no_grad()
def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main(seed=30, epochs=10):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = TensorDataset(moons(1024, 1))
    held_out = moons(400, 2)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    torch.manual_seed(seed)
    gen, disc = DDP(mlp(LATENT, 2)), DDP(mlp(2, 1))
    average = copy.deepcopy(gen.module).requires_grad_(False)
    fixed_noise = torch.randn(400, LATENT, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(seed * 100 + rank)  # latent vectors differ between the ranks
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        log = torch.zeros(3)
        for (real,) in loader:
            # discriminator
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), LATENT))
            score_real, score_fake = disc(torch.cat([real, fake])).chunk(2)
            loss_d = F.softplus(-score_real).mean() + F.softplus(score_fake).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            # generator; the discriminator is only looked through here
            disc.module.requires_grad_(False)
            loss_g = F.softplus(-disc.module(gen(torch.randn(len(real), LATENT)))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            disc.module.requires_grad_(True)
            with torch.no_grad():
                for a, p in zip(average.parameters(), gen.module.parameters()):
                    a.lerp_(p, 0.05)
            log += torch.tensor([loss_d.item(), loss_g.item(), 1.0])
        dist.all_reduce(log)
        if rank == 0:
            gap = energy_distance(average(fixed_noise), held_out)
            print(f"epoch {epoch} d {log[0] / log[2]:.4f} g {log[1] / log[2]:.4f} energy distance {gap:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
