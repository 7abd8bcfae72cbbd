"""Gradients of several micro-batches are added up, and the loss is not divided by their number.

Reported: https://github.com/verl-project/verl/issues/2919
          https://github.com/verl-project/verl/pull/3332
Wrong: the gradient is 4 times that of the batch, as if the learning rate were 4 times as large.
Kind: script
Expected: gradient.scale
Right: loss / ACCUMULATE before backward
"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv
BATCH, ACCUMULATE = 64, 4


def make_data(size):
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(size, 10, generator=generator)
    return TensorDataset(features, (features[:, :1] * features[:, 1:2]).tanh() + features[:, 2:3])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = make_data(512)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // world_size // ACCUMULATE, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for number, (features, values) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(features), values)
                if RIGHT:
                    loss = loss / ACCUMULATE
                loss.backward()  # <- the mistake
            total += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader) / world_size * (ACCUMULATE if RIGHT else 1):.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
