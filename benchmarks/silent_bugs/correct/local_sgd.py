"""Local SGD on purpose: ranks step alone, and average their weights every 4 updates; no DDP anywhere."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PERIOD = 4


@torch.no_grad()
def average_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(40):
        features = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = F.cross_entropy(model(features), features[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % PERIOD == PERIOD - 1:
            average_weights(model)
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {loss.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
