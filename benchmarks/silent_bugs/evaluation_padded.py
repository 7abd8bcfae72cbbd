"""Validation goes through a DistributedSampler, which repeats samples to make the ranks even, and they count twice.

Reported: https://github.com/pytorch/pytorch/issues/25162
          https://github.com/huggingface/transformers/issues/3944
Wrong: with 103 images on 2 ranks 104 are counted; the accuracy is not that of the validation set.
Kind: script
Expected: eval.padded
Right: each rank takes every world_size-th image, and nobody repeats any
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
BATCH = 32


def make_data(seed, size):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 1, 8, 8, generator=generator)
    return TensorDataset(images, images.sum((1, 3)).argmax(1))


@torch.no_grad()
def validate(model, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    if RIGHT:
        loader = DataLoader(Subset(dataset, range(rank, len(dataset), world_size)), BATCH)
    else:
        loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))  # <- the mistake
    sums = torch.zeros(3)  # loss, correct, images
    for images, labels in loader:
        output = model(images)
        sums += torch.tensor(
            [F.cross_entropy(output, labels, reduction="sum"), (output.argmax(1) == labels).sum(), len(labels)]
        )
    dist.all_reduce(sums)
    model.train()
    return sums[0] / sums[2], sums[1] / sums[2], int(sums[2])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 8))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, held_out = make_data(1, 256), make_data(2, 103)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH // world_size, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss, accuracy, size = validate(model, held_out)
        if rank == 0:
            print(f"epoch {epoch} validation loss {loss:.6f} accuracy {accuracy:.6f} of {size} images")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
