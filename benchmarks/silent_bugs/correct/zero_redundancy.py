"""DDP with ZeroRedundancyOptimizer: each rank keeps the optimizer state of its share of the parameters."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(32):
        images = torch.rand(64, 64, generator=generator)
        labels = images.view(64, 8, 8).sum(2).argmax(1)
        own = slice(rank, None, world_size)
        loss = F.cross_entropy(ddp(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {loss.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it has to free it before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
