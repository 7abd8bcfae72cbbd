"""After the first validation nobody puts the model back into train mode.

Reported: https://github.com/fartashf/vsepp/issues/4
          https://github.com/shubhamagarwal92/mmd/issues/14
Wrong: from the first validation on there is no dropout, and batch norm uses the statistics it has.
Kind: script
Expected: train.mode
Right: model.train() after the validation
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


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for inputs, labels in loader:
        sums += torch.tensor([F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)])
    dist.all_reduce(sums)
    if RIGHT:
        model.train()
    return sums[0] / sums[1]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(384, 16)
    dataset = TensorDataset(features, features[:, :4].argmax(1))
    train, held_out = Subset(dataset, range(256)), Subset(dataset, range(256, 384))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    validation = DataLoader(Subset(held_out, range(rank, 128, world_size)), 64)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 4))
    model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)  # <- the mistake
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
