"""Distributed data parallel, ranks started by hand that meet over a file: no port, no address, no launcher.

Run: python ddp_file.py --rank 0 --world-size 2 --init file:///tmp/ddp_file.rendezvous &
Run: python ddp_file.py --rank 1 --world-size 2 --init file:///tmp/ddp_file.rendezvous

Type each line, without the `&`, in a terminal of its own, in any order.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  no port may be opened, or none is known to be free, and all ranks see one file system

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- On several hosts the file is on storage that all share and that locks files for all of them, as NFS does; /tmp is not.
  Gradients still go over the network: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name its interface.
- The file must not exist when a run begins: torch adds to what it finds, and waits for the ranks of a run that is
  over. Rank 0 holds a lock beside it while it lives; a file without one was left by a run that was killed.
"""

import argparse
import csv
import fcntl
import gzip
import os
import socket
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


@torch.no_grad()
def evaluate(model, data, rank, world_size, device, group):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct, group=group)
    model.train()
    return correct.item() / len(data)


def choose_device(rank, world_size):
    """A CUDA device of its own for each rank, where every host has that many; else the CPU for all of them."""
    # Ranks of one place see the same devices. A terminal with a CUDA_VISIBLE_DEVICES of its own is a place, too.
    place = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [None] * world_size
    dist.all_gather_object(found, (place, torch.cuda.device_count()))  # over gloo
    places = [place for place, _ in found]
    if any(devices < places.count(place) for place, devices in found):
        return torch.device("cpu")
    device = torch.device("cuda", places[:rank].count(place))
    torch.cuda.set_device(device)
    return device


def refuse(why):  # in one line, with the exit status of wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def lock_rendezvous(path, rank):
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
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    if BATCH % args.world_size:
        parser.error(f"--world-size {args.world_size}: must divide BATCH={BATCH}")
    rank, world_size, path = args.rank, args.world_size, Path(urlsplit(args.init).path)
    lock_rendezvous(path, rank)
    torch.set_num_threads(max(1, os.cpu_count() // world_size))  # else each rank starts one for every core
    # The timeout ends the wait for a rank that died.
    dist.init_process_group("gloo", args.init, timedelta(minutes=5), world_size, rank)
    device = choose_device(rank, world_size)
    cuda = device.type == "cuda"
    # gloo was for the choice of devices: a group of NCCL is bound to one device of each rank when it is made
    group = dist.new_group(timeout=timedelta(minutes=5), backend="nccl", device_id=device) if cuda else None

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None, process_group=group)
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
        dist.all_reduce(losses, group=group)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device, group)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()
    if rank == 0:  # torch removes the file when the last rank lets go of it, but only where all of them come so far
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink()


if __name__ == "__main__":
    main()
