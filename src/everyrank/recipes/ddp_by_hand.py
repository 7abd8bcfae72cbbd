"""Distributed data parallel without a launcher: you start each rank, and ranks connect by an address or a file.

Run: python ddp_by_hand.py --rank 0 --world-size 2 --init tcp://127.0.0.1:29511 &
Run: python ddp_by_hand.py --rank 1 --world-size 2 --init tcp://127.0.0.1:29511

Type each line in its own terminal, without the `&`, in any order. --init selects how the ranks find each other:

  tcp://HOST:PORT   rank 0 listens on this port; HOST is the host of rank 0
  file:///PATH      all ranks open this file, and no port has to be open or free. The file must not exist yet
  env://            the default: rank and address come from environment variables, as with a launcher:
                    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 python ddp_by_hand.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       you have no launcher. For example: two hosts and two terminals, a debugger for each rank, or your own
               scheduler

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks.
- On several hosts, HOST is not localhost. Use an address, not a name: Debian maps a host's own name to 127.0.1.1. With
  each --init, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface for the gradients (eth0).
- PORT has to be free, and open in the firewall. If it is in use, rank 0 ends with EADDRINUSE. Use a different port for
  each training, below the ephemeral ports (on Linux, 32768 and up).
- The file has to be on storage that all hosts share and that supports locks, such as NFS. torch would append to an
  existing file and wait for ranks of an earlier run. Rank 0 therefore locks it: a file without a lock is left over.
- Set the variables on the line of the command. An exported variable affects the next script in that terminal, too.
- No process watches the ranks. When a rank dies, the others end at their next update or after the timeout.
"""

import argparse
import fcntl
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_device(rank, world_size):
    """Return a CUDA device for this rank if every host has one for each of its ranks, otherwise the CPU."""
    # Ranks with the same host name and CUDA_VISIBLE_DEVICES see the same devices.
    host = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    hosts_and_counts = [None] * world_size
    dist.all_gather_object(hosts_and_counts, (host, torch.cuda.device_count()))  # the default group uses gloo
    hosts = [host for host, _ in hosts_and_counts]
    if any(num_devices < hosts.count(host) for host, num_devices in hosts_and_counts):
        return torch.device("cpu")
    device = torch.device("cuda", hosts[:rank].count(host))
    torch.cuda.set_device(device)
    return device


def refuse(message):  # exit status 2: wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {message}\n")  # one write, because ranks share the terminal
    raise SystemExit(2)


def read_environment():
    """Return rank and world size from the variables that a launcher would set."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        refuse(f"the environment lacks {', '.join(missing)}: set {', '.join(VARIABLES)}, or give --init")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            refuse(f"{name}={os.environ[name]}: a whole number is needed")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def lock_rendezvous(path, rank):
    """Lock the file on rank 0, until the process ends. On other ranks, wait until a running rank 0 has created it."""
    deadline = time.monotonic() + 300
    while rank and not path.exists():
        if time.monotonic() > deadline:
            refuse(f"rank 0 has not created {path}: start rank 0 with the same --init")
        time.sleep(0.1)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if rank else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:  # a running rank 0 holds the lock
        if rank:
            return
        refuse(f"{path} is in use by another run: give another file")
    if rank or path.exists():
        os.close(lock)
        refuse(f"{path} was left by a run that was killed: remove it and start all ranks again")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, help="0 to world size - 1, different for each rank")
    parser.add_argument("--world-size", type=int, help="number of ranks on all hosts")
    parser.add_argument("--init", default="env://", help="tcp://HOST:PORT, file:///PATH or env:// (default)")
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = read_environment() if args.init == "env://" else (args.rank, args.world_size)
    if rank is None or world_size is None:
        refuse(f"--init {args.init} needs --rank and --world-size")
    if not 0 <= rank < world_size:
        refuse(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
    rendezvous_file = Path(urlsplit(args.init).path) if args.init.startswith("file:") else None
    if rendezvous_file:
        lock_rendezvous(rendezvous_file, rank)
    if "OMP_NUM_THREADS" not in os.environ:  # by default each rank starts a thread for every core
        torch.set_num_threads(max(1, os.cpu_count() // world_size))
    # The timeout ends the wait for a rank that was not started or that died.
    dist.init_process_group("gloo", args.init, timedelta(minutes=5), world_size, rank)
    device = choose_device(rank, world_size)
    cuda = device.type == "cuda"
    # The default group is gloo, to choose devices. Gradients use NCCL, which binds a group to one device per rank.
    group = dist.new_group(timeout=timedelta(minutes=5), backend="nccl", device_id=device) if cuda else None

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None, process_group=group)
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
        dist.all_reduce(losses, group=group)  # once per epoch: in the loop, every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct, group=group)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()
    if rendezvous_file and rank == 0:  # torch removes the file only if all ranks reach this line
        rendezvous_file.unlink(missing_ok=True)
        Path(f"{rendezvous_file}.lock").unlink()


if __name__ == "__main__":
    main()
