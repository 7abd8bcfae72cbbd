"""Distributed data parallel without a launcher: the script starts its own processes, one for each rank.

Run: python ddp_spawn.py --processes 2

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       one host is enough and plain `python` has to start it, for example in an IDE, a test, or a job that you
               do not control

What to change for your own training:
- Replace load() and build() of digits.py. On CUDA, set --processes to the number of devices.
- BATCH is the batch of all ranks. With a fixed batch per rank instead, the number of ranks changes the training.
- With masked or padded targets, all-reduce the number of loss terms before backward, and divide by it.
- Keep the code that starts processes under `if __name__ == "__main__":`, because every process imports this file.
- For several hosts, or to restart after a failure, use ddp_torchrun.py.
"""

import argparse
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


def train(rank, world_size, init_method, dtype):
    """Train on one rank. multiprocessing.spawn passes the rank as the first argument."""
    cuda = torch.cuda.device_count() >= world_size  # one GPU per rank
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # By default every rank starts a thread for every core, and the ranks slow each other down.
    torch.set_num_threads(max(1, os.cpu_count() // world_size))
    # The ranks find each other by a file, so no port has to be free. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
        device_id=device if cuda else None,
    )

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
            print_losses(epoch, losses, every_update=dtype == torch.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "ranks").as_uri()
        multiprocessing.spawn(train, (args.processes, init_method, dtype), nprocs=args.processes)
