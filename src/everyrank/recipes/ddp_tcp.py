"""Distributed data parallel without a launcher: each rank started by hand, told on its command line where to meet.

Run: python ddp_tcp.py --rank 0 --world-size 2 --init tcp://127.0.0.1:29511 &
Run: python ddp_tcp.py --rank 1 --world-size 2 --init tcp://127.0.0.1:29511

Type each line, without the `&`, in a terminal of its own, in any order; on several hosts, the same --init on all.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  no launcher is there: two machines and two terminals, or a debugger around each rank

What to change for your own training:
- load() and build() are your data and your network. Batch norm needs nn.SyncBatchNorm, on GPUs only.
- BATCH is the batch of all ranks. Fix the batch of one rank instead, and more ranks mean another training.
- HOST in tcp://HOST:PORT is that of rank 0, which listens there. On several hosts it is never localhost, and better an
  address than a name: Debian gives a host's own name the address 127.0.1.1, which leads other hosts to themselves.
- Gloo asks for that name too. On several hosts set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface (eth0).
- PORT has to be free on rank 0's host, and open in its firewall. If it is taken, rank 0 ends with EADDRINUSE; the other
  ranks may meet whoever has taken it, so give each training a port of its own, below those that systems hand out
  (Linux: 32768 and up).
- Nobody watches the ranks. When one dies, the others end at their next update, or when the timeout is over.
"""

import argparse
import csv
import gzip
import os
import socket
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True, help="0 to world size - 1, each given once")
    parser.add_argument("--world-size", type=int, required=True, help="how many ranks there are, on all hosts")
    parser.add_argument("--init", required=True, metavar="tcp://HOST:PORT", help="where rank 0 listens")
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    if not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: ranks count from 0 to {args.world_size - 1}")
    if BATCH % args.world_size:
        parser.error(f"--world-size {args.world_size}: must divide BATCH={BATCH}")
    rank, world_size = args.rank, args.world_size
    # Unless told, every rank starts a thread for every core, and they hold each other up.
    torch.set_num_threads(max(1, os.cpu_count() // world_size))
    # The timeout ends the wait for a rank that is never started, and later for one that died.
    dist.init_process_group(
        "gloo",
        init_method=args.init,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
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


if __name__ == "__main__":
    main()
