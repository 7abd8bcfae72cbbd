"""The sampler is never told the epoch, so every epoch reads the samples in the order of the first.

Reported: https://github.com/pytorch/pytorch/issues/31771
          https://github.com/lucidrains/DALLE-pytorch/pull/230
Wrong: shuffle=True shuffles once: the batches of all epochs are the same batches in the same order.
Kind: script
Expected: data.epoch
Right: sampler.set_epoch(epoch) before the loader is read
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv
BATCH = 32


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 64, generator=generator)
    return TensorDataset(images, images.view(size, 8, 8).sum(2).argmax(1))  # which row is the brightest


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    dataset = make_data(1, 256)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)

    for epoch in range(4):
        if RIGHT:
            sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:  # <- the mistake
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size:.6f}")

    images, labels = make_data(2, 512).tensors
    with torch.no_grad():
        print(f"rank {rank} test loss {F.cross_entropy(model(images), labels):.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
