"""Each rank draws its own train/validation split, so what one rank holds out another one trains on.

Reported: https://github.com/Lightning-AI/pytorch-lightning/issues/7728
          https://github.com/TensorAuto/OpenTau/pull/498
Wrong: the model has seen most of the validation images; the validation loss is too good.
Kind: script
Expected: data.split
Right: a generator with a fixed seed for the split
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

RIGHT = "--right" in sys.argv


def make_data():
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(160, 64, generator=generator)
    return TensorDataset(images, torch.randint(0, 4, (160,), generator=generator))  # labels of noise: only memorised


@torch.no_grad()
def validate(model, loader):
    sums = torch.zeros(2)
    for images, labels in loader:
        sums += torch.tensor([F.cross_entropy(model(images), labels, reduction="sum"), len(labels)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # so that dropout and augmentation differ between ranks
    dataset = make_data()
    generator = torch.Generator().manual_seed(0) if RIGHT else torch.default_generator
    train, held_out = random_split(dataset, [128, 32], generator=generator)  # <- the mistake
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    validation = DataLoader(held_out, 16, sampler=range(rank, 32, world_size))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation_loss = validate(model, validation)
        if rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch} train loss {loss:.6f} validation loss {validation_loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
