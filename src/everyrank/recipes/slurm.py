"""Distributed data parallel under Slurm, without torchrun: srun starts one task for each rank, on all nodes.

Run: srun --ntasks 2 --cpu-bind=none python slurm.py

In the queue: sbatch slurm.sbatch, which has the same line and what it asks for; `everyrank new slurm` writes it beside.

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


def place():
    """Rank, local rank and world size as Slurm says, and where rank 0 listens."""
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
    rank, local_rank, world_size, address = place()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout ends the wait for a rank that died.
    dist.init_process_group("nccl" if cuda else "gloo", address, timedelta(minutes=5), world_size, rank)

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
