"""A network on two devices, half on each (the simplest model parallelism), alone or with DistributedDataParallel.

Run: python model_parallel_two_devices.py

torchrun --standalone --nproc-per-node 2 model_parallel_two_devices.py: the same losses, each rank with two devices.

What to change for your own training:
- Where a network too large for one device is cut: both halves and their activations have to fit. While one device
  works the other one waits; pipeline.py lets both work, fsdp.py cuts every layer.
- Inputs go to the first device, targets to the last, where the output is. The optimizer comes after to(device).
- DDP of a module on several devices takes device_ids=None: each parameter's gradient is sent from where it is.
"""

import csv
import gzip
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster


def load(held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    rows = rows[(torch.arange(len(rows)) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


class TwoDevices(nn.Module):
    """A network in two halves, each on a device of its own: images on the first one -> scores on the second one."""

    def __init__(self, network, first, second):
        super().__init__()
        self.first, self.second = network[:2].to(first, DTYPE), network[2:].to(second, DTYPE)
        self.device = second

    def forward(self, images):
        # Backward takes the gradient the same way back: to() is a part of the graph.
        return self.second(self.first(images).to(self.device, non_blocking=True))


@torch.no_grad()
def evaluate(model, rank, world_size, first, second):
    """The fraction of the held-out images that are read right; each is read by one rank, none is repeated."""
    images, labels = load(held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=second)
    for batch in torch.arange(len(images)).split(BATCH):
        own = batch.tensor_split(world_size)[rank]
        right += (model(images[own].to(first)).argmax(1) == labels[own].to(second)).sum()
    if dist.is_initialized():
        dist.all_reduce(right)
    return right.item() / len(images)


def devices():
    """This process's two devices: GPUs of its own where every rank of this host has two, else the CPU for both."""
    local_rank, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= 2 * num_ranks:
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    if local_rank == 0:
        found = f"{2 * num_ranks} CUDA devices wanted, {torch.cuda.device_count()} found"
        sys.stderr.write(f"{Path(__file__).name}: {found}: both halves are on the CPU\n")
    return torch.device("cpu"), torch.device("cpu")


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first, second = devices()
    network = model = TwoDevices(build(), first, second)
    if "RANK" in os.environ:
        if first.type == "cuda":
            torch.cuda.set_device(first)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        dist.init_process_group("nccl" if first.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
        model = DistributedDataParallel(network, device_ids=None)
    images, labels = load(held_out=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=second)
        for index, batch in enumerate(batches):
            own = batch.tensor_split(world_size)[rank]
            loss = F.cross_entropy(model(images[own].to(first)), labels[own].to(second), reduction="sum")
            optimizer.zero_grad()
            # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
            (loss * world_size / len(batch)).backward()
            optimizer.step()
            sums[index] = loss.detach()

        if dist.is_initialized():
            dist.all_reduce(sums)
        if rank == 0:
            for index, total in enumerate(sums.tolist()):
                print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    top1 = evaluate(model, rank, world_size, first, second)
    if rank == 0:
        print(f"top1 {top1}")
    if dist.is_initialized():
        del model  # before its process group
        time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
