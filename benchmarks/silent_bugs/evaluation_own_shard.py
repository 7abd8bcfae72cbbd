"""Each rank validates its own share of the images, and rank 0 reports its own number as that of all.

Reported: https://github.com/modelscope/ms-swift/pull/10088
          https://github.com/NVIDIA/apex/pull/22
Wrong: the accuracy that is printed, and that chooses the best checkpoint, is that of a part of the validation set.
Kind: script
Expected: eval.shard
Right: the counts are summed over the ranks first
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
    images = torch.rand(size, 64, generator=generator)
    return TensorDataset(images, images.view(size, 8, 8).sum(1).argmax(1))


@torch.no_grad()
def accuracy(model, loader):
    correct = count = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
        count += len(labels)
    if RIGHT:
        sums = torch.tensor([correct, count])
        dist.all_reduce(sums)
        correct, count = sums.tolist()
    return correct / count  # <- the mistake


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, held_out = make_data(1, 512), make_data(2, 200)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    validation = DataLoader(Subset(held_out, range(rank, 200, world_size)), 64)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    best = 0.0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        top1 = accuracy(model, validation)
        best = max(best, top1)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f} validation accuracy {top1:.4f} best {best:.4f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
