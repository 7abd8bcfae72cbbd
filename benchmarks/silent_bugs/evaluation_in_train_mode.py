"""Validation runs with the model in train mode: dropout drops, and batch norm learns from the validation images.

Reported: https://github.com/wolny/pytorch-3dunet/issues/53
          https://github.com/lucidrains/DALLE2-pytorch/pull/79
Wrong: the validation loss is noisy and too high, and validation images leak into the running statistics.
Kind: script
Expected: eval.mode
Right: model.eval() before and model.train() after
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

RIGHT = "--right" in sys.argv


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 1, 8, 8, generator=generator)
    return TensorDataset(images, images.sum((1, 2)).argmax(1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 8),
    )


@torch.no_grad()
def validate(model, loader):
    if RIGHT:
        model.eval()
    sums = torch.zeros(2)
    for images, labels in loader:
        output = model(images)  # <- the mistake
        sums += torch.tensor([F.cross_entropy(output, labels, reduction="sum"), len(labels)])
    dist.all_reduce(sums)
    model.train()
    return sums[0] / sums[1]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, held_out = make_data(1, 256), make_data(2, 128)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    validation = DataLoader(Subset(held_out, range(rank, 128, world_size)), 32)
    model = DistributedDataParallel(build())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation_loss = validate(model, validation)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f} validation loss {validation_loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
