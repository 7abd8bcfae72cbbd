"""Distributed data parallel under Slurm, without torchrun: srun starts one task for each rank, on all nodes.

Run: srun --ntasks 2 --cpu-bind=none python slurm.py

As a batch job: sbatch slurm.sbatch, which `everyrank new slurm` writes next to this script.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       Slurm is how jobs start on your cluster

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks. Script and data are on storage
  that all nodes share.
- One task for each GPU: --ntasks-per-node and --gpus-per-node are the same number. SLURM_LOCALID counts on each node;
  with --gpus-per-task a task sees its own GPU only, as number 0, and NCCL then cannot reach those beside it directly.
- Without --cpu-bind=none many clusters bind each task to one core, and its loader workers with it.
- Rank 0 is on the first node of the list. Where its name is not known to the others, or means loopback, set
  MASTER_ADDR; where the port is taken, MASTER_PORT. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface.
- srun --kill-on-bad-exit=1 ends the other ranks at once when one fails; else they wait for the timeout.
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


def refuse(why):  # exit status 2: wrong usage
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")  # one write: ranks share the screen
    raise SystemExit(2)


def read_environment():
    """(rank, local rank, world size) from Slurm's variables, and the address where rank 0 listens."""
    env = os.environ
    if "SLURM_STEP_ID" not in env:  # in an allocation without srun there is only one process
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
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, local_rank, world_size, address = read_environment()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout ends the wait for a rank that died.
    name, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(name, address, timedelta(minutes=5), world_size, rank, device_id=bound)

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
