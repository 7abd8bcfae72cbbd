import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EMA:
    """Averaged copy of a model, which can lend its weights to the online model."""

    def __init__(self, model, beta=0.95, update_after=5):
        self.online, self.average = model, copy.deepcopy(model).requires_grad_(False)
        self.beta, self.update_after, self.steps = beta, update_after, 0

    @torch.no_grad()
    def update(self):
        self.steps += 1
        beta = self.beta if self.steps > self.update_after else 0.0
        for a, p in zip(self.average.parameters(), self.online.parameters()):
            a.lerp_(p, 1 - beta)

    @torch.no_grad()
    def lend(self):
        for a, p in zip(self.average.parameters(), self.online.parameters()):
            p.copy_(a)


class Generator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], -1))


def rings(count, g):
    angle = 6.283 * torch.rand(count, 1, generator=g)
    radius = 1 + 0.1 * torch.randn(count, 1, generator=g)
    return radius * torch.cat([angle.cos(), angle.sin()], 1)


def main(steps=60, lend_every=15):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = EMA(model.module) if rank == 0 else None
    g = torch.Generator().manual_seed(8 + rank)
    for step in range(1, steps + 1):
        clean = rings(32, g)
        t = torch.rand(32, 1, generator=g)
        noise = torch.randn(32, 2, generator=g)
        loss = nn.functional.mse_loss(model((1 - t) * clean + t * noise, t), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            ema.update()
        if step % lend_every == 0:
            if rank == 0:
                print(f"step {step}: {loss.item():.4f}")
                ema.lend()
            for p in model.parameters():
                dist.broadcast(p.data, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
