"""Distributed data parallel over several hosts: torchrun on each, with checks that they can reach each other.

Run: torchrun --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29513 multi_node.py &
Run: torchrun --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 29513 multi_node.py

This is one machine playing two. On two hosts of four GPUs, each line on its host, --nproc-per-node 4 and an address of
the first host that the second reaches. Or the same line on both, without --node-rank (c10d):
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29513 --rdzv-id 7 multi_node.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  several hosts are yours and no scheduler starts the ranks on them; with one, slurm.py or mpi.py

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- c10d: where both hosts wait a minute and fail, the first did not see that the endpoint is its own: give it
  --rdzv-conf is_host=1 (is_host=0 on the others). Or they do not know its name: give each --local-addr, its address.
- Debian gives a host's own name the address 127.0.1.1. Gloo follows the name, so on each host set GLOO_SOCKET_IFNAME
  (and NCCL_SOCKET_IFNAME) to the interface of the address that is printed below; the firewall lets its ports through.
- Data, script and packages are the same on all hosts: torch's version is compared here, the rest is not.
- LOCAL_RANK picks the device. RANK picks the samples: with LOCAL_RANK each host would read the same ones.
"""

import argparse
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


def refuse(why):  # one line from each host, with the exit status of wrong usage
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def rendezvous():
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    store, rank, world_size = rendezvous()
    if BATCH % world_size:
        refuse(f"BATCH={BATCH}: {world_size} ranks must divide it")
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    name, timeout = "nccl" if cuda else "gloo", timedelta(minutes=5)  # the end of a wait for a rank that died
    bound = device if cuda else None
    dist.init_process_group(name, timeout=timeout, world_size=world_size, rank=rank, store=store, device_id=bound)

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
