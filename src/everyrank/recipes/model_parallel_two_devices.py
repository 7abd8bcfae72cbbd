"""A network on two devices, half on each (the simplest model parallelism), alone or with DistributedDataParallel.

Run: python model_parallel_two_devices.py

torchrun --standalone --nproc-per-node 2 model_parallel_two_devices.py: the same losses, each rank with two devices.

Memory         half of the layers on each of the two devices of a rank
Communication  activations from the first device to the second, their gradients back; with DDP all gradients, by
               all-reduce
Use when       a network is slightly too large for one device; while one device works, the other one waits

What to change for your own training:
- Where the network is divided: both halves and their activations have to fit. pipeline.py lets both devices work at
  once, fsdp.py shards every layer.
- Inputs go to the first device, targets to the last, where the output is. The optimizer comes after to(device).
- DDP of a module on several devices takes device_ids=None: each parameter's gradient is sent from where it is.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


class TwoDevices(nn.Module):
    """A network in two halves, each on a device of its own: images on the first one -> scores on the second one."""

    def __init__(self, network, first, second):
        super().__init__()
        self.first, self.second = network[:2].to(first), network[2:].to(second)
        self.device = second

    def forward(self, images):
        # Backward takes the gradient the same way back: to() is a part of the graph.
        return self.second(self.first(images).to(self.device, non_blocking=True))


def devices():
    """This process's two devices: GPUs of its own where every rank of this host has two, else the CPU for both."""
    local_rank, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= 2 * num_ranks:
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    if local_rank == 0:
        message = f"{2 * num_ranks} CUDA devices wanted, {torch.cuda.device_count()} message"
        sys.stderr.write(f"{Path(__file__).name}: {message}: both halves are on the CPU\n")
    return torch.device("cpu"), torch.device("cpu")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first, second = devices()
    network = model = TwoDevices(build().to(dtype), first, second)
    if "RANK" in os.environ:
        if first.type == "cuda":
            torch.cuda.set_device(first)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        # "nccl" of torch 2.15 takes tensors of one device only; the older implementation, of several.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        dist.init_process_group("nccl" if first.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
        model = DistributedDataParallel(network, device_ids=None)
    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=first.type == "cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(first, non_blocking=True), labels.to(second, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # the sum over ranks: DDP divides it by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if dist.is_initialized():
            dist.all_reduce(losses)
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(network, eval_data, first, rank, world_size)
    if dist.is_initialized():
        dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    if dist.is_initialized():
        del model  # before its process group is destroyed
        time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
