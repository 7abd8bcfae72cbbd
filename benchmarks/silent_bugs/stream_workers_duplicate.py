"""A stream is divided over the ranks but not over the workers of the loader, so each worker yields all of it.

Reported: https://github.com/huggingface/datasets/issues/3423
Wrong: with two workers each sample comes twice in an epoch; twice the updates, every sample seen twice.
Kind: script
Expected: data.repeat
Right: the stream is divided over ranks x workers
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RIGHT = "--right" in sys.argv


class Documents(IterableDataset):
    def __init__(self, size, rank, world_size):
        self.size, self.rank, self.world_size = size, rank, world_size

    def __iter__(self):
        part, parts = self.rank, self.world_size
        if RIGHT:
            worker = get_worker_info()
            part, parts = part * worker.num_workers + worker.id, parts * worker.num_workers
        for number in range(part, self.size, parts):
            generator = torch.Generator().manual_seed(number)
            start = torch.randint(0, 16, (1,), generator=generator)
            tokens = (start + torch.arange(9) * (1 + number % 3)) % 16  # counts up in steps of 1, 2 or 3
            yield tokens[:-1], tokens[1:]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 24), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(256, rank, world_size), 32 // world_size, num_workers=2)
    step = 0
    for epoch in range(2):
        for inputs, targets in loader:  # <- the mistake
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0:
            print(f"epoch {epoch} after {step} updates, last loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
