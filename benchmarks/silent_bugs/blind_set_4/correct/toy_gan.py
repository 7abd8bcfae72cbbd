import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def mlp(a, b, c):
    return nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2), nn.Linear(b, b), nn.LeakyReLU(0.2), nn.Linear(b, c))


class GAN:
    def __init__(self, latent=6):
        self.latent = latent
        self.gen = DistributedDataParallel(mlp(latent, 32, 2))
        self.disc = DistributedDataParallel(mlp(2, 32, 1))
        self.g_opt = torch.optim.Adam(self.gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.d_opt = torch.optim.Adam(self.disc.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def noise(self, n):
        return torch.randn(n, self.latent)

    def disc_step(self, real):
        with torch.no_grad():
            fake = self.gen.module(self.noise(len(real)))  # no gradient wanted, so no wrapper needed
        scores = self.disc(torch.cat([real, fake]))
        r, f = scores.chunk(2)
        loss = F.softplus(-r).mean() + F.softplus(f).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def gen_step(self, n):
        for p in self.disc.parameters():
            p.requires_grad_(False)
        loss = F.softplus(-self.disc.module(self.gen(self.noise(n)))).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        for p in self.disc.parameters():
            p.requires_grad_(True)
        return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    gan = GAN()
    for step in range(24):
        angle = torch.rand(32) * 6.283
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2)
        d = gan.disc_step(real)
        g = gan.gen_step(32) if step % 2 else float("nan")
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} disc {d:.4f} gen {g:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
