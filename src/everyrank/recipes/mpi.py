"""Distributed data parallel started by mpirun, of Open MPI or MPICH; the ranks then talk over gloo or NCCL, not MPI.

Run: mpirun -n 2 --bind-to none python mpi.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  mpirun is how jobs start on your cluster

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- --bind-to none: else mpirun binds each rank to one core, and its threads and loader workers with it.
- On several hosts set where rank 0 listens, as an address that all reach, and hand it on to all ranks:
  MASTER_ADDR=10.0.0.1 MASTER_PORT=29514 mpirun -n 8 --host a:4,b:4 -x MASTER_ADDR -x MASTER_PORT ... (Open MPI);
  MPICH's, which hands on the whole environment, needs no -x. Likewise GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
- On one host the ranks meet over a file named after the process that started them. A shell in between is another such
  process for each rank: end its script with `exec python mpi.py`, or set MASTER_ADDR and MASTER_PORT.
- As root, or with more ranks than cores, Open MPI wants --allow-run-as-root, or --oversubscribe.
"""

import argparse
import csv
import gzip
import os
import sys
import tempfile
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
VARIABLES = (  # rank, local rank, world size, ranks of this host: Open MPI; MPICH and Intel MPI
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
    ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"],
)


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
    """(rank, local rank, world size, ranks of this host) as mpirun says, and the init_method that all ranks share."""
    found = [names for names in VARIABLES if all(name in os.environ for name in names)]
    if not found:
        refuse(f"not started by mpirun: mpirun -n 2 --bind-to none python {Path(__file__).name}")
    rank, local_rank, world_size, local_size = (int(os.environ[name]) for name in found[0])
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return rank, local_rank, world_size, local_size, f"tcp://{host}:{port}"
    if world_size != local_size:
        refuse("the ranks are on several hosts: set MASTER_ADDR and MASTER_PORT, and give mpirun -x for both")
    folder = Path(tempfile.gettempdir(), f"mpi-{os.getuid()}")  # where nobody else can put a file for us to read
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        refuse(f"{folder} belongs to somebody else: set TMPDIR to a folder of your own")
    # Process numbers come again, and a run that was killed leaves its file: with the time of its start it is unique.
    stat = Path(f"/proc/{os.getppid()}/stat")  # Linux only
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return rank, local_rank, world_size, local_size, f"file://{folder}/{os.getppid()}-{began}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    rank, local_rank, world_size, local_size, init_method = read_environment()
    if BATCH % world_size:
        refuse(f"BATCH={BATCH}: {world_size} ranks must divide it")
    cuda = torch.cuda.device_count() >= local_size  # one for each rank
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // local_size))  # else each rank starts one for every core
    # The timeout ends the wait for a rank that died.
    name, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(name, init_method, timedelta(minutes=5), world_size, rank, device_id=bound)

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
    if rank == 0 and init_method.startswith("file://"):  # torch 2.15 leaves the file
        Path(init_method.removeprefix("file://")).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
