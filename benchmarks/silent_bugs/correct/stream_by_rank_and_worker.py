"""An IterableDataset that divides its stream over ranks and workers; a fixed number of updates, so nobody waits."""

import time
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        for index in islice(count(), self.rank * workers + number, None, self.world_size * workers):
            generator = torch.Generator().manual_seed(index)
            point = torch.rand(2, generator=generator) * 4 - 2
            yield point, (point.pow(2).sum() < 2).long()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Stream(rank, world_size), 64 // world_size, num_workers=2)
    for step, (points, inside) in enumerate(islice(loader, 40)):
        loss = F.cross_entropy(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step} loss {loss.item():.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
