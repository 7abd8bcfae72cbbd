"""Small denoising diffusion on points with an EMA copy; noise and times differ by rank."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 50
betas = torch.linspace(1e-3, 0.1, STEPS)
alpha_bar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


@torch.no_grad()
def ema_update(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def sample(model, n, g):
    x = torch.randn(n, 2, generator=g)
    for t in reversed(range(STEPS)):
        eps = model(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alpha_bar[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn(n, 2, generator=g)
    return x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    phi = torch.rand(320) * 6.28
    data = TensorDataset(torch.stack([phi.cos(), phi.sin()], 1) + 0.05 * torch.randn(320, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    net = Denoiser()
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(1000 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            t = torch.randint(0, STEPS, (len(x),), generator=g)
            eps = torch.randn(x.shape, generator=g)
            a = alpha_bar[t][:, None]
            loss = (model(a.sqrt() * x + (1 - a).sqrt() * eps, t) - eps).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_update(ema, net, 0.95)
        if rank == 0:
            radius = sample(ema, 64, torch.Generator().manual_seed(5)).norm(dim=1).mean()
            print(f"epoch {epoch} loss {loss.item():.4f} radius of samples {radius:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
