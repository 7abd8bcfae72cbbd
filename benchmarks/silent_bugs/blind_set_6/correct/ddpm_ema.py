# DDPM on short signals, DDP, EMA of the weights, validation with the EMA model.
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIZE, T, EPOCHS, BATCH = 32, 200, 6, 32
betas = torch.linspace(1e-4, 0.04, T)
alpha_bar = torch.cumprod(1 - betas, 0)


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.arange(SIZE) / SIZE
    f = torch.randint(1, 4, (n, 1), generator=g)
    return (6.2832 * (f * x + torch.rand(n, 1, generator=g))).sin().unsqueeze(1)


class UNet1d(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.temb = nn.Sequential(nn.Embedding(T, c), nn.Linear(c, c), nn.SiLU())
        self.a, self.b = nn.Conv1d(1, c, 3, padding=1), nn.Conv1d(c, c, 4, 2, 1)
        self.m = nn.Conv1d(c, c, 3, padding=1)
        self.u, self.o = nn.ConvTranspose1d(c, c, 4, 2, 1), nn.Conv1d(2 * c, 1, 3, padding=1)
        self.n1, self.n2 = nn.GroupNorm(4, c), nn.GroupNorm(4, c)

    def forward(self, x, t):
        e = self.temb(t)[:, :, None]
        h1 = F.silu(self.n1(self.a(x) + e))
        h2 = F.silu(self.n2(self.b(h1) + e))
        h2 = h2 + F.silu(self.m(h2))
        return self.o(torch.cat([h1, self.u(h2)], 1))


def noisy(x, noise, t):
    a = alpha_bar[t][:, None, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


@torch.no_grad()
def ema_update(ema, net, decay):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p, 1 - decay)


@torch.no_grad()
def sample(net, n, g):
    x = torch.randn(n, 1, SIZE, generator=g)
    for i in reversed(range(T)):
        eps = net(x, torch.full((n,), i))
        x = (x - betas[i] / (1 - alpha_bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i:
            x = x + betas[i].sqrt() * torch.randn(x.shape, generator=g)
    return x


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = UNet1d()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = torch.Generator().manual_seed(500 + rank)

    data = TensorDataset(signals(1024, seed=1))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    val = signals(128, seed=2)
    vg = torch.Generator().manual_seed(3)
    v_noise, v_t = torch.randn(val.shape, generator=vg), torch.randint(0, T, (len(val),), generator=vg)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        run = torch.zeros(2)
        for (x,) in loader:
            noise = torch.randn(x.shape, generator=rng)
            t = torch.randint(0, T, (len(x),), generator=rng)
            loss = F.mse_loss(model(noisy(x, noise, t), t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            ema_update(ema, net, min(0.98, (1 + step) / (10 + step)))
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        s = slice(rank, None, world)
        with torch.no_grad():
            err = (ema(noisy(val[s], v_noise[s], v_t[s]), v_t[s]) - v_noise[s]).pow(2)
        tot = torch.tensor([err.sum(), float(err.numel())])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {run[0] / run[1]:.4f} ema val {tot[0] / tot[1]:.4f}", flush=True)

    if rank == 0:
        x = sample(ema, 16, torch.Generator().manual_seed(9))
        print(f"samples: mean {x.mean():.3f} std {x.std():.3f}")
        with tempfile.TemporaryDirectory() as d:
            torch.save({"model": net.state_dict(), "ema": ema.state_dict(), "step": step}, os.path.join(d, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
