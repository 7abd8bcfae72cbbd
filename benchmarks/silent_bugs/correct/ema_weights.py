"""An exponential moving average of the weights beside DDP; batch norm, whose buffers DDP takes from rank 0."""

import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def update_average(average, model, decay=0.95):
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)
    for mean, value in zip(average.buffers(), model.buffers(), strict=True):
        mean.copy_(value)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(320, 10)
    dataset = TensorDataset(features[:256], features[:256, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 64 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    average = copy.deepcopy(model).requires_grad_(False).eval()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_average(average, model)
        if rank == 0:
            held_out = F.cross_entropy(average(features[256:]), features[256:, :3].argmax(1))
            print(f"epoch {epoch} loss {loss.item():.6f} held-out loss of the average {held_out.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
