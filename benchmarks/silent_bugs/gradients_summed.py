"""Gradients are all-reduced by hand, and nobody divides the sum by the number of ranks.

Reported: https://github.com/pytorch/pytorch/issues/162338
Wrong: every gradient is world_size times too large, as FSDP2's were under gloo, which took AVG for SUM.
Kind: script
Expected: gradient.scale
Right: gradient / world_size after the all-reduce
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv


def average_gradients(model):
    world_size = dist.get_world_size() if RIGHT else 1
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # <- the mistake
        parameter.grad /= world_size


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.rand(320, 64)
    dataset = TensorDataset(images, images.view(320, 8, 8).sum(2).argmax(1))
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))  # the same seed: the same weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
