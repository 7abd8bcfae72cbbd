"""Two networks, two optimizers: gradients that the generator's loss leaves in the discriminator are thrown away."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def real_samples(generator, size):
    angle = torch.rand(size, 1, generator=generator) * 6.2832
    return torch.cat([angle.cos(), angle.sin()], 1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
    own = torch.Generator().manual_seed(100 + rank)  # each rank draws its own samples
    for step in range(40):
        real, noise = real_samples(own, 64 // world_size), torch.randn(64 // world_size, 4, generator=own)
        fake = maker(noise)

        judge_optimizer.zero_grad()
        scores = judge(torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        judge_loss = F.binary_cross_entropy_with_logits(scores, wanted)
        judge_loss.backward()
        judge_optimizer.step()

        maker_optimizer.zero_grad()
        maker_loss = F.binary_cross_entropy_with_logits(judge(fake), torch.ones(len(fake), 1))
        maker_loss.backward()
        maker_optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step} judge {judge_loss.item():.6f} maker {maker_loss.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
