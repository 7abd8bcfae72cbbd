"""Distributed data parallel with Slurm, without torchrun: srun starts one task for each rank, on all nodes.

Run: srun --ntasks 2 --cpu-bind=none python slurm.py

For a batch job, run sbatch slurm.sbatch. `everyrank new slurm` writes this file next to the script.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       your cluster starts jobs with Slurm

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks. Keep script and data on storage that all
  nodes share.
- Start one task for each GPU: use the same number for --ntasks-per-node and --gpus-per-node. With --gpus-per-task, a
  task sees only its own GPU, and NCCL cannot use direct transfers between the GPUs of a node.
- Pass --cpu-bind=none. Otherwise many clusters bind each task, with its loader workers, to one core.
- Rank 0 is on the first node. If other nodes cannot resolve its name, or resolve it to loopback, set MASTER_ADDR. If
  the port is in use, set MASTER_PORT. To select an interface, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
- With srun --kill-on-bad-exit=1, the other ranks end when one fails. Otherwise they wait until the timeout.
"""

import argparse
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


def refuse(message):  # exit status 2: wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {message}\n")  # one write, because ranks share the terminal
    raise SystemExit(2)


def read_environment():
    """Return (rank, local rank, world size) from Slurm's variables, and the address of rank 0."""
    env = os.environ
    if "SLURM_STEP_ID" not in env:  # without srun, an allocation starts only one process
        job = f"in job {env['SLURM_JOB_ID']}, but not by srun" if "SLURM_JOB_ID" in env else "not in a job of Slurm"
        refuse(f"started {job}: srun --ntasks 2 --cpu-bind=none python {Path(__file__).name}")
    rank, local_rank, world_size = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NTASKS"))
    nodes, gpus = int(env["SLURM_STEP_NUM_NODES"]), torch.cuda.device_count()
    if world_size == nodes and gpus > 1:
        refuse(f"one task on each node, but {gpus} GPUs: srun --ntasks-per-node {gpus}, or --gpus-per-node 1")
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else "")
    if not host:
        if shutil.which("scontrol") is None:
            refuse("scontrol, which lists the nodes, is not on this node: set MASTER_ADDR to the first node")
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
        host = completed.stdout.split()[0]
    # The port depends on job and step, so that two on one node differ. It is below the ephemeral ports.
    port = env.get("MASTER_PORT") or 12000 + (int(env["SLURM_JOB_ID"]) * 64 + int(env["SLURM_STEP_ID"])) % 20000
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) * nodes // world_size))  # ranks share the node's cores
    return rank, local_rank, world_size, f"tcp://{host}:{port}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, local_rank, world_size, address = read_environment()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout ends the wait for a rank that died.
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, address, timedelta(minutes=5), world_size, rank, device_id=device_id)

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


if __name__ == "__main__":
    main()
