"""Denoising diffusion in the latent space of a frozen encoder."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

T = 100
DIM, LATENT = 32, 8
BATCH = 16          # per process
EPOCHS = 8

betas = torch.linspace(1e-3, 0.12, T)
alphas_bar = torch.cumprod(1 - betas, dim=0)


def make_scans(n=640):
    g = torch.Generator().manual_seed(50)
    centers = 2.0 * torch.randn(5, DIM, generator=g)
    size = torch.exp(0.6 * torch.randn(n, 1, generator=g))     # a few scans are much brighter
    x = size * (centers[torch.randint(0, 5, (n,), generator=g)] + 0.5 * torch.randn(n, DIM, generator=g))
    return TensorDataset(x)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(LATENT, width)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, LATENT))

    def forward(self, z, t):
        return self.net(self.inp(z) + self.time(t))


@torch.no_grad()
def latent_scale_factor(autoencoder, loader):
    """1 / std of the latents of the first batch."""
    (x,) = next(iter(loader))
    z = autoencoder(x).double()
    moments = torch.stack([z.sum(), z.pow(2).sum(), torch.tensor(float(z.numel()), dtype=torch.float64)])
    dist.all_reduce(moments)
    mean = moments[0] / moments[2]
    std = (moments[1] / moments[2] - mean ** 2).sqrt()
    return 1.0 / std.item()


@torch.no_grad()
def sample(model, n, scale_factor):
    z = torch.randn(n, LATENT)
    for t in reversed(range(T)):
        eps = model(z, torch.full((n,), t))
        z = (z - betas[t] / (1 - alphas_bar[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
        if t > 0:
            z += betas[t].sqrt() * torch.randn_like(z)
    return z / scale_factor


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    autoencoder = nn.Linear(DIM, LATENT, bias=False).requires_grad_(False)   # stands for the trained encoder
    model = DDP(Denoiser())
    ema = copy.deepcopy(model.module).requires_grad_(False)

    dataset = make_scans()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    scale_factor = latent_scale_factor(autoencoder, loader)
    if rank == 0:
        print(f"scale factor set to {scale_factor:.5f}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(500 + rank)         # noise and time steps
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        for (x,) in loader:
            z0 = autoencoder(x) * scale_factor
            t = torch.randint(0, T, (len(x),))
            noise = torch.randn_like(z0)
            a = alphas_bar[t][:, None]
            loss = F.mse_loss(model(a.sqrt() * z0 + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for pe, p in zip(ema.parameters(), model.module.parameters()):
                    pe.lerp_(p, 0.02)
            epoch_loss += loss.detach()
        epoch_loss /= len(loader)
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}  loss {epoch_loss / world:.4f}")

    if rank == 0:
        z = sample(ema, 256, scale_factor)
        print(f"samples: mean {z.mean():.3f}  std {z.std():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
