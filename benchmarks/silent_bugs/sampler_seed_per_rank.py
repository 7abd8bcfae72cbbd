"""The samplers of the ranks have different seeds, so their shares of the data overlap.

Reported: https://github.com/NVlabs/LongLive/issues/71
Wrong: the ranks cut their shares out of different permutations: some samples come twice in an epoch, others never.
Kind: script
Expected: data.overlap
Right: one seed for the samplers of all ranks
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
SEED = 11


def make_data(size):
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(size, 2, generator=generator)
    return TensorDataset(points, (points.norm(dim=1) > 1.1).long())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = SEED if RIGHT else SEED * (1 + rank)
    torch.manual_seed(SEED)
    dataset = make_data(320)
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed, drop_last=True)  # <- the mistake
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for points, inside in loader:
            loss = F.cross_entropy(model(points), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        read = torch.zeros(len(dataset))
        read[list(sampler)] = 1
        dist.all_reduce(read)
        with torch.no_grad():
            total = F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1])
        if rank == 0:
            print(f"epoch {epoch} loss on all data {total:.6f}; {int((read > 0).sum())} of 320 samples were read")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
