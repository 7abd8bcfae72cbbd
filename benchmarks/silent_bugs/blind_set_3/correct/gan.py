"""DCGAN recipe on one-dimensional signals; every rank draws its own latent vectors."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def generator(nz):
    return nn.Sequential(nn.Linear(nz, 32 * 4), nn.ReLU(), nn.Unflatten(1, (32, 4)),
                         nn.ConvTranspose1d(32, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
                         nn.ConvTranspose1d(16, 1, 4, 2, 1), nn.Tanh())


def discriminator():
    return nn.Sequential(nn.Conv1d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
                         nn.Conv1d(16, 32, 4, 2, 1), nn.GroupNorm(4, 32), nn.LeakyReLU(0.2),
                         nn.Flatten(), nn.Linear(32 * 4, 1))


def waves(n=256):
    g = torch.Generator().manual_seed(1)
    t = torch.linspace(0, 6.28, 16)
    return TensorDataset(torch.sin(t + 6.28 * torch.rand(n, 1, generator=g))[:, None] * 0.8)


def main():
    opt = argparse.ArgumentParser()
    opt.add_argument("--niter", type=int, default=2)
    opt.add_argument("--batch", type=int, default=16)
    opt.add_argument("--nz", type=int, default=8)
    opt = opt.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100)
    torch.set_num_threads(1)
    data = waves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=opt.batch, sampler=sampler)
    netG, netD = DDP(generator(opt.nz)), DDP(discriminator())
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    noise = torch.Generator().manual_seed(7 + rank)
    for epoch in range(opt.niter):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            n = len(real)
            ones, zeros = torch.ones(n, 1), torch.zeros(n, 1)
            fake = netG(torch.randn(n, opt.nz, generator=noise))

            optD.zero_grad()
            out = netD(torch.cat([real, fake.detach()]))
            errD = bce(out, torch.cat([ones, zeros]))
            errD.backward()
            optD.step()

            optG.zero_grad()
            netD.requires_grad_(False)
            errG = bce(netD.module(fake), ones)
            errG.backward()
            netD.requires_grad_(True)
            optG.step()
        if rank == 0:
            print(f"[{epoch}/{opt.niter}] Loss_D {errD.item():.4f} Loss_G {errG.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
