# Small GAN on 2-D spirals: hinge loss, two discriminator steps per generator step, EMA of the generator.
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z, BATCH, EPOCHS, D_STEPS = 8, 64, 8, 2


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = 1 + 5 * torch.rand(n, generator=g)
    arm = torch.randint(0, 2, (n,), generator=g) * 3.1416
    x = torch.stack([t * torch.cos(t + arm), t * torch.sin(t + arm)], dim=1) / 4
    return x + 0.03 * torch.randn(n, 2, generator=g)


def mlp(i, o, h=64):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


@torch.no_grad()
def update_ema(ema, model, decay=0.98):
    for p_ema, p in zip(ema.parameters(), model.parameters()):
        p_ema.lerp_(p, 1 - decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    G, D = DDP(mlp(Z, 2)), DDP(mlp(2, 1))
    G_ema = copy.deepcopy(G.module).requires_grad_(False)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    torch.manual_seed(1 + rank)  # other latents on every process

    data = TensorDataset(spirals(2048, seed=5))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        d_sum, g_sum = torch.zeros(2), torch.zeros(2)
        for (real,) in loader:
            with torch.no_grad():
                fake = G.module(torch.randn(len(real), Z))
            # one forward for both halves, DDP wants one forward per backward
            score_real, score_fake = D(torch.cat([real, fake])).chunk(2)
            d_loss = F.relu(1 - score_real).mean() + F.relu(1 + score_fake).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            d_sum += torch.tensor([d_loss.item(), 1.0])
            step += 1
            if step % D_STEPS == 0:
                D.module.requires_grad_(False)
                g_loss = -D.module(G(torch.randn(BATCH, Z))).mean()
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()
                D.module.requires_grad_(True)
                update_ema(G_ema, G.module)
                g_sum += torch.tensor([g_loss.item(), 1.0])
        dist.all_reduce(d_sum)
        dist.all_reduce(g_sum)
        if rank == 0:
            print(f"epoch {epoch} d_loss {d_sum[0] / d_sum[1]:.4f} g_loss {g_sum[0] / g_sum[1]:.4f}", flush=True)

    if rank == 0:
        g = torch.Generator().manual_seed(9)
        with torch.no_grad():
            fake = G_ema(torch.randn(500, Z, generator=g))
        print(f"mean distance to data {torch.cdist(fake, spirals(1000, seed=6)).min(1).values.mean():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
