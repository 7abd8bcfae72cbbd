# GAN on a ring of gaussians, generator and critic each in DDP
import math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ZDIM, BATCH, STEPS = 4, 64, 40


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


def ring(n, gen):
    k = torch.randint(0, 8, (n,), generator=gen) * (2 * math.pi / 8)
    return torch.stack([k.cos(), k.sin()], 1) + 0.05 * torch.randn(n, 2, generator=gen)


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    G, D = DDP(mlp(ZDIM, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    gen = torch.Generator().manual_seed(500 + rank)

    for step in range(STEPS):
        # critic
        real = ring(BATCH, gen)
        with torch.no_grad():
            fake = G.module(torch.randn(BATCH, ZDIM, generator=gen))
        out = D(torch.cat([real, fake]))
        loss_d = bce(out[:BATCH], 1.0) + bce(out[BATCH:], 0.0)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        # generator
        z = torch.randn(BATCH, ZDIM, generator=gen)
        loss_g = bce(D(G(z)), 1.0)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        if step % 10 == 9:
            both = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(both)
            if rank == 0:
                print(step + 1, "d %.4f g %.4f" % tuple((both / world).tolist()))
    if rank == 0:
        torch.save({"G": G.module.state_dict(), "D": D.module.state_dict()}, "/tmp/blind2/gan_ring.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
