"""The optimizer is built before fully_shard replaces the parameters, and goes on stepping the old ones.

Reported: https://github.com/huggingface/accelerate/pull/3394
          https://github.com/pytorch/pytorch/issues/149205
Wrong: the parameters of the model never change; the loss stays where it began.
Kind: script
Expected: weights.not-stepped
Right: fully_shard first, then the optimizer
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RIGHT = "--right" in sys.argv


def make_batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    images = torch.rand(32, 64, generator=generator)
    labels = images.view(32, 8, 8).sum(2).argmax(1)
    return images[rank::world_size], labels[rank::world_size]


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    if RIGHT:
        shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # <- the mistake
    if not RIGHT:
        shard(model, mesh)
    for step in range(40):
        images, labels = make_batch(step, rank, world_size)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
