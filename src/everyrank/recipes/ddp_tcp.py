"""Distributed data parallel without a launcher: each rank started by hand, told where to meet in its words.

Run: python ddp_tcp.py --rank 0 --world-size 2 --init tcp://127.0.0.1:29511 &
Run: python ddp_tcp.py --rank 1 --world-size 2 --init tcp://127.0.0.1:29511

Type each line, without the `&`, in a terminal of its own, in any order; on several hosts, the same --init on all.

What to change for your own training:
- load() and build() are your data and your network. Batch norm needs nn.SyncBatchNorm, on CUDA only.
- BATCH is the batch of all ranks. Fix the batch of one rank instead, and more ranks mean another training.
- HOST in tcp://HOST:PORT is that of rank 0, which listens there. On several hosts it is never localhost, and better an
  address than a name: Debian gives a host's own name the address 127.0.1.1, where the host meets nobody but itself.
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True, help="0 to world size - 1, each given once")
    parser.add_argument("--world-size", type=int, required=True, help="how many ranks there are, on all hosts")
    parser.add_argument("--init", required=True, metavar="tcp://HOST:PORT", help="where rank 0 listens")
    parser.add_argument("--local-rank", type=int, help="which CUDA device of this host; else they are taken in turn")
    args = parser.parse_args()
    if not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: ranks count from 0 to {args.world_size - 1}")
    rank, world_size = args.rank, args.world_size
    cuda = torch.cuda.is_available()
    local_rank = args.local_rank if args.local_rank is not None else rank % max(1, torch.cuda.device_count())
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Unless told, every rank starts a thread for every core, and they hold each other up.
    torch.set_num_threads(max(1, os.cpu_count() // world_size))
    # The timeout ends the wait for a rank that is never started, and later for one that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=args.init,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
        device_id=device if cuda else None,
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
