"""Model parallelism: half of the layers on each of two devices, with or without DistributedDataParallel.

Run: python model_parallel_two_devices.py

With DDP, where each rank uses two devices and the losses are the same:
torchrun --standalone --nproc-per-node 2 model_parallel_two_devices.py

Memory         half of the layers on each of the two devices of a rank
Communication  activations go to the second device, and their gradients back; DDP also all-reduces the gradients
               of the parameters
Use when       a network is slightly too large for one device; while one device works, the other one waits

What to change for your own training:
- Choose the split so that each half fits on its device, with its activations. pipeline.py lets both devices work at
  once, fsdp.py shards every layer.
- Move inputs to the first device and targets to the second, where the output is. Make the optimizer after to(device).
- Pass device_ids=None to DDP: a module on several devices is sent from where each parameter is.
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
    """A network in two halves: takes images on the first device, returns scores on the second one."""

    def __init__(self, network, first_device, second_device):
        super().__init__()
        self.first_half, self.second_half = network[:2].to(first_device), network[2:].to(second_device)
        self.second_device = second_device

    def forward(self, images):
        # Autograd records to(): backward copies the gradient to the first device.
        return self.second_half(self.first_half(images).to(self.second_device, non_blocking=True))


def choose_devices():
    """Return two GPUs of this rank, or the CPU twice if this host has fewer than two for each rank."""
    local_rank, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= 2 * num_ranks:
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    if local_rank == 0:
        counts = f"{2 * num_ranks} CUDA devices are needed, {torch.cuda.device_count()} were found"
        sys.stderr.write(f"{Path(__file__).name}: {counts}: both halves run on the CPU\n")
    return torch.device("cpu"), torch.device("cpu")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first_device, second_device = choose_devices()
    network = model = TwoDevices(build().to(dtype), first_device, second_device)
    if "RANK" in os.environ:
        if first_device.type == "cuda":
            torch.cuda.set_device(first_device)
        # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
        # In torch 2.15, "nccl" accepts tensors of one device only; the older implementation accepts several devices.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        dist.init_process_group("nccl" if first_device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
        model = DistributedDataParallel(network, device_ids=None)
    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=first_device.type == "cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(first_device, non_blocking=True), labels.to(second_device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if dist.is_initialized():
            dist.all_reduce(losses)
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(network, eval_data, first_device, rank, world_size)
    if dist.is_initialized():
        dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    if dist.is_initialized():
        del model  # DDP has to be freed before its process group is destroyed
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
