"""An IterableDataset yields the whole stream on every rank, so all ranks train on the same samples.

Reported: https://github.com/huggingface/datasets/issues/5360
          https://github.com/Lightning-AI/pytorch-lightning/issues/15734
Wrong: every update sees each sample world_size times; an epoch takes world_size times as many updates as it should.
Kind: script
Expected: data.rows
Right: rank r keeps every world_size-th sample of the stream
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
BATCH = 32


class Readings(IterableDataset):
    """A log of sensor readings, one line after the other, as it would be read from a file."""

    def __init__(self, size):
        self.size = size

    def lines(self):
        generator = torch.Generator().manual_seed(7)
        truth = torch.linspace(-1, 1, 12)
        for _ in range(self.size):
            reading = torch.randn(12, generator=generator)
            yield reading, (reading @ truth + 0.5 * reading[0] * reading[1]).unsqueeze(0)

    def __iter__(self):
        for number, line in enumerate(self.lines()):
            if RIGHT and number % dist.get_world_size() != dist.get_rank():
                continue
            yield line


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Readings(384), BATCH // world_size)
    for epoch in range(2):
        for step, (readings, values) in enumerate(loader):  # <- the mistake
            loss = F.mse_loss(model(readings), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average = loss.detach() / world_size
            dist.all_reduce(average)
            if rank == 0 and step % 4 == 0:
                print(f"epoch {epoch} step {step} loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
