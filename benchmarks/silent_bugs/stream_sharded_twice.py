"""The stream is divided over the ranks by the dataset and once more by the loop, so samples are silently skipped.

Reported: https://github.com/huggingface/accelerate/pull/4276
          https://github.com/huggingface/accelerate/issues/3547
Wrong: each rank trains on 1 / world_size of its own share; the other samples are read by nobody.
Kind: script
Expected: data.skipped
Right: only the dataset divides
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

RIGHT = "--right" in sys.argv


class Numbers(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for number in range(dist.get_rank(), self.size, dist.get_world_size()):
            bits = torch.tensor([float(number >> bit & 1) for bit in range(9)])
            yield bits, torch.tensor(number % 5)


def batches(loader):
    for number, batch in enumerate(loader):
        if not RIGHT and number % dist.get_world_size() != dist.get_rank():  # <- the mistake
            continue
        yield batch


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(Numbers(512), 64 // world_size)
    for epoch in range(3):
        seen, total = 0, torch.zeros(())
        for bits, remainder in batches(loader):
            loss = F.cross_entropy(model(bits), remainder)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(bits)
            seen += len(bits)
        sums = torch.stack([total, torch.tensor(float(seen))])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.6f} over {int(sums[1])} samples")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
