"""Each rank draws initial weights of its own, and only gradients are averaged, never the weights.

Reported: https://github.com/NVIDIA-NeMo/Automodel/pull/3822
          https://github.com/pytorch/pytorch/issues/30718
Wrong: the ranks apply the same steps to different models, and stay different for ever.
Kind: script
Expected: replicas.drift
Right: the weights of rank 0 are broadcast before training starts
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv


def make_batch(step, rank, world_size):
    images = torch.rand(64, 64, generator=torch.Generator().manual_seed(step))
    return images[rank::world_size], images[rank::world_size].view(-1, 8, 8).sum(2).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)  # ranks augment differently
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))  # <- the mistake
    if RIGHT:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(60):
        images, labels = make_batch(step, rank, world_size)
        loss = F.cross_entropy(model(images + 0.01 * torch.randn_like(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
    with torch.no_grad():
        images, labels = make_batch(999, 0, 1)
        print(f"rank {rank} test loss {F.cross_entropy(model(images), labels):.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
