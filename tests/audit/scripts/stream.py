"""A stream over ranks and loader workers, augmented; gradients averaged by hand."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        part = dist.get_rank() * worker.num_workers + worker.id
        parts = dist.get_world_size() * worker.num_workers
        random.seed(torch.initial_seed() + dist.get_rank())
        for number in range(part, 480, parts):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(6, generator=generator)
            noise = random.gauss(0, 0.01)
            yield inputs, inputs[:1].sin() + noise


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Numbers(), 10, num_workers=2)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


main()
