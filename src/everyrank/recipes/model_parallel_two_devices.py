"""A network on two devices, half on each (the simplest model parallelism), alone or with DistributedDataParallel.

Run: python model_parallel_two_devices.py

torchrun --standalone --nproc-per-node 2 model_parallel_two_devices.py: the same losses, each rank with two devices.

Holds     half of the layers on each of the two devices of a rank
Travels   activations from the first device to the second, their gradients back; with DDP all gradients, by all-reduce
Use when  a network is slightly too large for one device; while one device works, the other one waits

What to change for your own training:
- Where the network is divided: both halves and their activations have to fit. pipeline.py lets both devices work at
  once, fsdp.py shards every layer.
- Inputs go to the first device, targets to the last, where the output is. The optimizer comes after to(device).
- DDP of a module on several devices takes device_ids=None: each parameter's gradient is sent from where it is.
"""

import argparse
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
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0


def load(dtype):
    """Real handwritten digits for training and, every fifth, held out: images (1, 8, 8) from 0 to 1, and labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    held_out = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


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
        self.first, self.second = network[:2].to(first), network[2:].to(second)
        self.device = second

    def forward(self, images):
        # Backward takes the gradient the same way back: to() is a part of the graph.
        return self.second(self.first(images).to(self.device, non_blocking=True))


@torch.no_grad()
def evaluate(model, data, rank, world_size, first, second):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=second)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(first)).argmax(1) == labels.to(second)).sum()
    if dist.is_initialized():
        dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")
    first, second = devices()
    network = model = TwoDevices(build().to(dtype), first, second)
    if "RANK" in os.environ:
        if first.type == "cuda":
            torch.cuda.set_device(first)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        # "nccl" of torch 2.15 takes tensors of one device only; the older implementation, of several.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        dist.init_process_group("nccl" if first.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
        model = DistributedDataParallel(network, device_ids=None)
    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, world_size, rank, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=first.type == "cuda")
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=second)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(first, non_blocking=True), labels.to(second, non_blocking=True)
            loss = F.cross_entropy(model(images), labels, reduction="none")
            loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
            (loss * world_size / size).backward()
            optimizer.step()
            losses[index] = loss.detach() / size

        if dist.is_initialized():
            dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(network, held_out, rank, world_size, first, second)
    if rank == 0:
        print(f"top1 {top1}")
    if dist.is_initialized():
        del model  # before its process group
        time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
