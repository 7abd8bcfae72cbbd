"""Nobody calls zero_grad, so each update steps with the sum of all gradients since the start.

Reported: https://stackoverflow.com/questions/60335387/pytorch-mnist-example-not-converge
          https://github.com/tenstorrent/tt-blacksmith/pull/711
Wrong: old gradients are carried along and averaged once more by DDP with each update; steps grow and overshoot.
Kind: script
Expected: gradient.carried
Right: optimizer.zero_grad() before backward
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


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    points = torch.rand(512, 2) * 4 - 2
    dataset = TensorDataset(points, ((points[:, 0] > 0) ^ (points[:, 1] > 0)).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 64 // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            if RIGHT:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # <- the mistake
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
