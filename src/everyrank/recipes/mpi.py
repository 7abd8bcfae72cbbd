"""Distributed data parallel started by mpirun, of Open MPI or MPICH; the ranks then talk over gloo or NCCL, not MPI.

Run: mpirun -n 2 --bind-to none python mpi.py

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

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
PLACES = (  # rank, local rank, world size, ranks of this host: Open MPI; MPICH and Intel MPI
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
    ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"],
)


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
    """Rank, local rank, world size and ranks of this host as mpirun says, and where they meet."""
    sets = [[int(os.environ[name]) for name in names] for names in PLACES if all(name in os.environ for name in names)]
    if not sets:
        refuse(f"not started by mpirun: mpirun -n 2 --bind-to none python {Path(__file__).name}")
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return *sets[0], f"tcp://{host}:{port}"
    if sets[0][2] != sets[0][3]:
        refuse("the ranks are on several hosts: set MASTER_ADDR and MASTER_PORT, and give mpirun -x for both")
    folder = Path(tempfile.gettempdir(), f"mpi-{os.getuid()}")  # where nobody else can put a file for us to read
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        refuse(f"{folder} belongs to somebody else: set TMPDIR to a folder of your own")
    # Process numbers come again, and a run that was killed leaves its file: with the time of its start it is unique.
    stat = Path(f"/proc/{os.getppid()}/stat")  # Linux only
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return *sets[0], f"file://{folder}/{os.getppid()}-{began}"


def main():
    rank, local_rank, world_size, local_size, meeting_place = place()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // local_size))  # else each rank starts one for every core
    # The timeout ends the wait for a rank that died.
    dist.init_process_group("nccl" if cuda else "gloo", meeting_place, timedelta(minutes=5), world_size, rank)

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
