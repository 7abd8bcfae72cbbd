"""GAN on 2-d points; both networks' gradients are averaged by hand, EMA of the generator."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

GLOBAL_BATCH, STEPS, Z = 128, 300, 8


def ring(n, seed=3):
    g = torch.Generator().manual_seed(seed)
    angle = 6.2832 * torch.randint(0, 8, (n,), generator=g) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2, generator=g)


def mlp(i, o, width=64):
    return nn.Sequential(nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o))


def sync_gradients(net, world):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = GLOBAL_BATCH // world
    torch.manual_seed(0)
    G, D = mlp(Z, 2), mlp(2, 1)
    for p in [*G.parameters(), *D.parameters()]:
        dist.broadcast(p.data, src=0)
    G_ema = copy.deepcopy(G).requires_grad_(False)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))

    points = ring(2000)
    picker = torch.Generator().manual_seed(1)      # shared: draws the global batch
    torch.manual_seed(77 + rank)                   # own noise on every process

    for step in range(1, STEPS + 1):
        idx = torch.randint(0, len(points), (GLOBAL_BATCH,), generator=picker)
        real = points[idx[rank * batch:(rank + 1) * batch]]

        fake = G(torch.randn(batch, Z)).detach()
        loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        sync_gradients(D, world)
        opt_d.step()

        loss_g = F.softplus(-D(G(torch.randn(batch, Z)))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        sync_gradients(G, world)
        opt_g.step()

        with torch.no_grad():
            for pe, p in zip(G_ema.parameters(), G.parameters()):
                pe.mul_(0.99).add_(p, alpha=0.01)

        if step % 50 == 0:
            logs = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(logs)
            logs /= world
            if rank == 0:
                print(f"step {step}  D {logs[0]:.4f}  G {logs[1]:.4f}")

    if rank == 0:
        with torch.no_grad():
            radius = G_ema(torch.randn(1000, Z)).norm(dim=1)
        print(f"radius of samples {radius.mean():.3f} +- {radius.std():.3f} (data {points.norm(dim=1).mean():.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
