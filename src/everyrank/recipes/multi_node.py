"""Distributed data parallel over several hosts: torchrun on each, and their usual misunderstandings said at once.

Run: torchrun --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29513 multi_node.py &
Run: torchrun --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 29513 multi_node.py
This is one machine playing two. On two hosts of four GPUs, each line on its host, --nproc-per-node 4 and an address of
the first host that the second reaches. Or the same line on both, without --node-rank (c10d):
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29513 --rdzv-id 7 multi_node.py

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- c10d: where both hosts wait a minute and fail, the first did not see that the endpoint is its own: give it
  --rdzv-conf is_host=1 (is_host=0 on the others). Or they do not know its name: give each --local-addr, its address.
- Debian gives a host's own name the address 127.0.1.1. Gloo follows the name, so on each host set GLOO_SOCKET_IFNAME
  (and NCCL_SOCKET_IFNAME) to the interface of the address that is printed below; the firewall lets its ports through.
- Data, script and packages are the same on all hosts: torch's version is compared here, the rest is not.
- LOCAL_RANK picks the device. RANK picks the samples: with LOCAL_RANK each host would read the same ones.
"""

import csv
import gzip
import ipaddress
import json
import os
import socket
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


def refuse(why):  # one line from each host, with the exit status of wrong usage
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def meet():
    """The store of all ranks, this one's rank and how many there are, once their hosts are found to fit together."""
    if "GROUP_RANK" not in os.environ:
        refuse("not started by torchrun; its lines are at the top of this file")
    master, own, local_rank = os.environ["MASTER_ADDR"], socket.gethostname(), os.environ["LOCAL_RANK"]
    try:
        family, *_, there = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing; the system picks the address it would come from
            address = probe.getsockname()[0]
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        store.set(f"host of {rank}", json.dumps([own, torch.__version__, there[0]]))
        hosts = [json.loads(store.get(f"host of {other}")) for other in range(world_size)]
    except (dist.DistError, OSError) as error:
        refuse(f"{own} did not find all others by MASTER_ADDR={master}: {str(error).splitlines()[0]}")
    if len({version for _, version, _ in hosts}) > 1:
        refuse(f"not the same torch: {', '.join(sorted({f'{host} has {version}' for host, version, _ in hosts}))}")
    for host, _, seen in hosts:
        if len({name for name, _, _ in hosts}) > 1 and ipaddress.ip_address(seen.partition("%")[0]).is_loopback:
            refuse(f"MASTER_ADDR={master} is {seen} on {host}, loopback: change --master-addr (of c10d: --local-addr)")
    sys.stdout.write(f"rank {rank} of {world_size}: host {own}, local rank {local_rank}, address {address}\n")
    return store, rank, world_size


def main():
    store, rank, world_size = meet()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    name, timeout = "nccl" if cuda else "gloo", timedelta(minutes=5)  # the end of a wait for a rank that died
    dist.init_process_group(name, timeout=timeout, world_size=world_size, rank=rank, store=store)

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
