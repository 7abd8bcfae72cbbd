"""Distributed data parallel, ranks started by hand: each reads its rank from the environment, as under a launcher.

Run: RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 python ddp_env.py &
Run: RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 python ddp_env.py

Type each line, without the `&`, in a terminal of its own, in any order.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  something of your own starts the processes (a scheduler, Kubernetes, ssh) and can set variables

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- torchrun sets these variables too, so the same script runs under it: nothing here has to change.
- RANK counts over all hosts, LOCAL_RANK on each host from 0: it picks the CUDA device. Given RANK instead, the second
  host asks for devices that it has not.
- Set them on the line of the command, as above. One that was exported once stays in that terminal, and the next script
  started there waits for ranks that nobody starts.
- MASTER_ADDR and MASTER_PORT are where rank 0 listens, the same on all ranks. On several hosts: an address that the
  others reach, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface (eth0) that leads there.
- A job of Slurm or MPI has other variables: see slurm.py and mpi.py.
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
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


@torch.no_grad()
def evaluate(model, data, rank, world_size, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def refuse(why):  # in one line, with the exit status of wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def read_environment():
    """(rank, local rank, world size), once everything that is needed is found to be there."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        refuse(f"the environment lacks {', '.join(missing)}: each rank needs all of {', '.join(NEEDED)}")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            refuse(f"{name}={os.environ[name]}: a whole number is needed")
    rank, local_rank, world_size = (int(os.environ[name]) for name in NEEDED[:3])
    if rank >= world_size:
        refuse(f"RANK={rank}, but WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    if BATCH % world_size:
        refuse(f"WORLD_SIZE={world_size}: it must divide BATCH={BATCH}")
    return rank, local_rank, world_size


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    rank, local_rank, world_size = read_environment()
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # one for each rank
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:  # which torchrun sets; else each rank starts a thread for every core
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    # The timeout ends the wait for a rank that is never started, and later for one that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", "env://", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(ddp(images), labels, reduction="none")
            loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
            (loss * world_size / size).backward()
            optimizer.step()
            losses[index] = loss.detach() / size

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
