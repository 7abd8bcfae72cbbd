import random
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

SEED, EPOCHS, BATCH = 42, 5, 4


def make_latents(count=64):
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (8, 4), (6, 6)]
    latents = []
    for n in range(count):
        h, w = shapes[n % 3]
        tone = torch.randn(3, 1, 1, generator=g)
        latents.append(tone + 0.3 * torch.randn(3, h, w, generator=g))
    return latents


class Buckets:
    """Groups images by aspect ratio; an epoch gives each process its part of every bucket."""

    def __init__(self, latents):
        self.by_ratio = defaultdict(list)
        for index, latent in enumerate(latents):
            self.by_ratio[f"{latent.shape[2] / latent.shape[1]:.2f}"].append(index)

    def split(self, epoch, rank, world):
        parts = {}
        for ratio, members in self.by_ratio.items():
            members = list(members)
            random.Random(f"{SEED}-{epoch}-{ratio}").shuffle(members)
            usable = len(members) // (world * BATCH) * world * BATCH
            parts[ratio] = members[:usable][rank::world]
        return parts

    def batches(self, epoch, rank, world):
        for ratio, members in sorted(self.split(epoch, rank, world).items()):
            for k in range(0, len(members), BATCH):
                yield ratio, members[k : k + BATCH]


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.out = nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 3, 1))

    def forward(self, x, t):
        return self.out(self.inp(x) + self.time(t[:, None])[:, :, None, None])


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(SEED + rank)
    torch.manual_seed(SEED + rank)
    latents = make_latents()
    buckets = Buckets(latents)
    model = DistributedDataParallel(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        total, steps = 0.0, 0
        for ratio, members in buckets.batches(epoch, rank, world):
            clean = torch.stack([latents[m] for m in members])
            t, noise = torch.rand(len(clean)), torch.randn_like(clean)
            level = t.view(-1, 1, 1, 1)
            guess = model((1 - level) * clean + level * noise, t)
            loss = nn.functional.mse_loss(guess, noise - clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        if rank == 0:
            print(f"epoch {epoch}: loss {total / steps:.4f} in {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
