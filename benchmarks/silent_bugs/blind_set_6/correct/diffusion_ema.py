"""Denoising diffusion on 1-D signals: DDP, accumulation of two micro-batches, EMA weights, checkpoint at the end."""
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

T, LEN, ACCUM, EPOCHS = 50, 32, 2, 6


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 6.28, LEN)
    return torch.sin((1 + 2 * torch.rand(n, 1, generator=g)) * x + 6.28 * torch.rand(n, 1, generator=g))


class Denoiser(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(LEN + 16, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, LEN))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


class EMA:
    def __init__(self, model, decay=0.98):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Denoiser())
    ema = EMA(model.module)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.15, T), dim=0)

    data = TensorDataset(signals(1024, seed=1))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    assert len(loader) % ACCUM == 0
    noise_rng = torch.Generator().manual_seed(500 + rank)   # times and noise of this process

    def diffusion_loss(net, x, g):
        t = torch.randint(0, T, (len(x),), generator=g)
        eps = torch.randn(x.shape, generator=g)
        a = alpha_bar[t][:, None]
        return F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for i, (x,) in enumerate(loader):
            if (i + 1) % ACCUM == 0:
                loss = diffusion_loss(model, x, noise_rng)
                (loss / ACCUM).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                ema.update(model.module)
            else:
                with model.no_sync():
                    loss = diffusion_loss(model, x, noise_rng)
                    (loss / ACCUM).backward()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            with torch.no_grad():
                val = diffusion_loss(ema.model, signals(400, seed=2), torch.Generator().manual_seed(0))
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} ema val {val.item():.4f}", flush=True)

    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "last.pt")
            torch.save({"model": model.module.state_dict(), "ema": ema.model.state_dict(),
                        "opt": opt.state_dict(), "epoch": EPOCHS}, path)
            print(f"saved {os.path.getsize(path) // 1024} KiB", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
