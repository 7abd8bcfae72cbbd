"""Distributed data parallel with mpirun (Open MPI or MPICH), which starts the ranks; they use gloo or NCCL, not MPI.

Run: mpirun -n 2 --bind-to none python mpi.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       your cluster starts jobs with mpirun

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks.
- Pass --bind-to none. Otherwise mpirun binds each rank, with its threads and loader workers, to one core.
- On several hosts, pass an address of rank 0 that all hosts can reach. For example, with Open MPI:
  MASTER_ADDR=10.0.0.1 MASTER_PORT=29514 mpirun -n 8 --host a:4,b:4 -x MASTER_ADDR -x MASTER_PORT ...
  MPICH passes the whole environment and needs no -x. Pass GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME the same way.
- On one host, ranks find each other by a file, whose name contains the parent process of each rank. If a shell script
  starts the rank, end it with `exec python mpi.py`, or set MASTER_ADDR and MASTER_PORT.
- Open MPI needs --allow-run-as-root for root, and --oversubscribe for more ranks than cores.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
VARIABLES = (  # rank, local rank, world size, ranks of this host; from Open MPI, or MPICH and Intel MPI
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
    ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"],
)


def refuse(message):  # exit status 2: wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {message}\n")  # one write, because ranks share the terminal
    raise SystemExit(2)


def read_environment():
    """Return (rank, local rank, world size, ranks of this host) from mpirun's variables, and the init_method."""
    variables = [names for names in VARIABLES if all(name in os.environ for name in names)]
    if not variables:
        refuse(f"not started by mpirun: mpirun -n 2 --bind-to none python {Path(__file__).name}")
    rank, local_rank, world_size, local_size = (int(os.environ[name]) for name in variables[0])
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return rank, local_rank, world_size, local_size, f"tcp://{host}:{port}"
    if world_size != local_size:
        refuse("the ranks are on several hosts: set MASTER_ADDR and MASTER_PORT, and pass both with mpirun -x")
    folder = Path(tempfile.gettempdir(), f"mpi-{os.getuid()}")  # only this user can write there
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        refuse(f"{folder} belongs to another user: set TMPDIR to a folder of yours")
    # A killed run leaves its file, and process ids are used again. With the start time, the name is unique.
    stat = Path(f"/proc/{os.getppid()}/stat")  # Linux only
    start_time = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return rank, local_rank, world_size, local_size, f"file://{folder}/{os.getppid()}-{start_time}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, local_rank, world_size, local_size, init_method = read_environment()
    cuda = torch.cuda.device_count() >= local_size  # one GPU per rank
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // local_size))  # by default each rank starts a thread for every core
    # The timeout ends the wait for a rank that died.
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, init_method, timedelta(minutes=5), world_size, rank, device_id=device_id)

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()
    if rank == 0 and init_method.startswith("file://"):  # torch 2.15 leaves the file
        Path(init_method.removeprefix("file://")).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
