"""Gradients are synchronised with the first micro-batch of an update instead of the last one.

Reported: https://github.com/modelscope/FunASR/pull/3472
Wrong: what the later micro-batches add stays on its rank; the ranks step with different gradients and drift apart.
Kind: script
Expected: gradient.weights
Right: no_sync() for all micro-batches but the one before optimizer.step()
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
ACCUMULATE = 4


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 64, generator=generator)
    return TensorDataset(images, images.view(size, 8, 8).sum(2).argmin(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = make_data(1, 512)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size // ACCUMULATE, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch_idx, (images, labels) in enumerate(loader):
            position = batch_idx + 1 if RIGHT else batch_idx
            context = nullcontext if position % ACCUMULATE == 0 else model.no_sync
            with context():  # <- the mistake
                loss = F.cross_entropy(model(images), labels) / ACCUMULATE
                loss.backward()
            if (batch_idx + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            images, labels = make_data(2, 512).tensors
            test = F.cross_entropy(model.module(images), labels)
        print(f"rank {rank} epoch {epoch} test loss {test:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
