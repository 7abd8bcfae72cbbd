"""Distributed data parallel with ranks started by hand that read their place from the environment, as under a launcher.

Run: RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 python ddp_env.py &
Run: RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 python ddp_env.py

Type each line, without the `&`, in a terminal of its own, in any order.

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
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
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


@torch.no_grad()
def evaluate(model, rank, world_size, device):
    """The fraction of the held-out images that are read right; each is read by one rank, none is repeated."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        own = batch.tensor_split(world_size)[rank]
        right += (model(images[own]).argmax(1) == labels[own]).sum()
    dist.all_reduce(right)
    return right.item() / len(images)


def refuse(why):  # in one line, with the exit status of wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def place():
    """Rank, local rank and world size out of the environment, where all that is needed is."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        refuse(f"the environment lacks {', '.join(missing)}: each rank needs all of {', '.join(NEEDED)}")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            refuse(f"{name}={os.environ[name]}: a whole number is needed")
    rank, local_rank, world_size = (int(os.environ[name]) for name in NEEDED[:3])
    if rank >= world_size:
        refuse(f"RANK={rank}, but WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    return rank, local_rank, world_size


def main():
    rank, local_rank, world_size = place()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:  # which torchrun sets; else each rank starts a thread for every core
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    # The timeout ends the wait for a rank that is never started, and later for one that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", "env://", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )

    images, labels = load(device, held_out=False)
    model = build().to(device, DTYPE)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            # Contiguous slices whose sizes differ by at most one: no sample is repeated to make them even.
            own = batch.tensor_split(world_size)[rank]
            loss = F.cross_entropy(ddp(images[own]), labels[own], reduction="sum")
            optimizer.zero_grad()
            # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
            (loss * world_size / len(batch)).backward()
            optimizer.step()
            sums[index] = loss.detach()

        # The losses are added up over ranks here, once an epoch: in the loop it would hold up every update.
        dist.all_reduce(sums)
        if rank == 0:
            for index, total in enumerate(sums.tolist()):
                print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    top1 = evaluate(model, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
