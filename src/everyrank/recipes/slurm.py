"""Distributed data parallel under Slurm, without torchrun: srun starts one task for each rank, on all nodes.

Run: srun --ntasks 2 --cpu-bind=none python slurm.py

In the queue: sbatch slurm.sbatch, which has the same line and what it asks for; `everyrank new slurm` writes it beside.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  Slurm is how jobs start on your cluster

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks. Script and data are on storage
  that all nodes share.
- One task for each GPU: --ntasks-per-node and --gpus-per-node are the same number. SLURM_LOCALID counts on each node;
  with --gpus-per-task a task sees its own GPU only, as number 0, and NCCL then cannot reach those beside it directly.
- Without --cpu-bind=none many clusters bind each task to one core, and its loader workers with it.
- Rank 0 is on the first node of the list. Where its name is not known to the others, or means loopback, set
  MASTER_ADDR; where the port is taken, MASTER_PORT. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface.
- srun --kill-on-bad-exit=1 ends the other ranks at once when one fails; else they wait for the timeout.
"""

import argparse
import csv
import gzip
import os
import shutil
import subprocess
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


def refuse(why):  # in one line, with the exit status of wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # in one go: ranks share the screen
    raise SystemExit(2)


def read_environment():
    """(rank, local rank, world size) as Slurm says, and the address where rank 0 listens."""
    env = os.environ
    if "SLURM_STEP_ID" not in env:  # an allocation alone says how many tasks there are to be, but starts only one
        job = f"in job {env['SLURM_JOB_ID']}, but not by srun" if "SLURM_JOB_ID" in env else "not in a job of Slurm"
        refuse(f"started {job}: srun --ntasks 2 --cpu-bind=none python {Path(__file__).name}")
    rank, local_rank, world_size = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NTASKS"))
    nodes, gpus = int(env["SLURM_STEP_NUM_NODES"]), torch.cuda.device_count()
    if world_size == nodes and gpus > 1:
        refuse(f"one task on each node, but {gpus} GPUs: srun --ntasks-per-node {gpus}, or --gpus-per-node 1")
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else "")
    if not host:
        if shutil.which("scontrol") is None:
            refuse("no scontrol on this node to read the list of nodes with: set MASTER_ADDR to the first")
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
        host = shown.stdout.split()[0]
    # A port of this job and step, so that two on one node do not meet; below those that the system hands out.
    port = env.get("MASTER_PORT") or 12000 + (int(env["SLURM_JOB_ID"]) * 64 + int(env["SLURM_STEP_ID"])) % 20000
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) * nodes // world_size))  # the node's cores, shared
    return rank, local_rank, world_size, f"tcp://{host}:{port}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    rank, local_rank, world_size, address = read_environment()
    if BATCH % world_size:
        refuse(f"BATCH={BATCH}: {world_size} ranks must divide it")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout ends the wait for a rank that died.
    name, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(name, address, timedelta(minutes=5), world_size, rank, device_id=bound)

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
