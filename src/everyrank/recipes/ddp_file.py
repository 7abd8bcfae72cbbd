"""Distributed data parallel with ranks started by hand that meet over a file: no port, no address, no launcher.

Run: python ddp_file.py --rank 0 --world-size 2 --init file:///tmp/ddp_file.meeting &
Run: python ddp_file.py --rank 1 --world-size 2 --init file:///tmp/ddp_file.meeting
Type each line, without the `&`, in a terminal of its own, in any order.

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- On several hosts the file is on storage that all share and that locks files for all of them, as NFS does; /tmp is not.
  Gradients go over the network as ever: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name its interface.
- The file must not be there when a run begins: torch adds to what it finds, and waits for the ranks of a run that is
  over. Rank 0 holds a lock beside it while it lives; a file without one was left by a run that was killed.
"""

import argparse
import csv
import fcntl
import gzip
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster


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


def meet(path, rank):
    """Rank 0 takes the lock, and has it until it ends. The others return when such a rank 0 has made the file."""
    end = time.monotonic() + 300
    while rank and not path.exists():
        if time.monotonic() > end:
            refuse(f"rank 0 has not made {path}: start it, with the same --init")
        time.sleep(0.1)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if rank else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:  # a rank 0 that lives has it
        if rank:
            return
        refuse(f"{path} is in use by another run: give another file")
    if rank or path.exists():
        os.close(lock)
        refuse(f"{path} was left by a run that was killed: remove it, and start all ranks again")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--init", required=True, metavar="file:///PATH", help="not there yet; %%20 in it is no space")
    args = parser.parse_args()
    rank, world_size, path = args.rank, args.world_size, Path(urlsplit(args.init).path)
    meet(path, rank)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // world_size))  # else each rank starts one for every core
    # The timeout ends the wait for a rank that died.
    dist.init_process_group("nccl" if cuda else "gloo", args.init, timedelta(minutes=5), world_size, rank)

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
    if rank == 0:  # torch removes the file when the last rank lets go of it, but only where all of them come so far
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink()


if __name__ == "__main__":
    main()
