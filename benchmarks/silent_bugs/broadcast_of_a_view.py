"""Weights that are transposed views on rank 0 are broadcast over gloo, which takes no notice of strides.

Reported: https://github.com/pytorch/pytorch/issues/192920
          https://github.com/pytorch/pytorch/issues/24836
Wrong: the other ranks have the right numbers in the wrong places; no error, no warning, and other models to train.
Kind: script
Expected: replicas.drift
Right: .contiguous() before the broadcast
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv


def read_kernels():
    """A checkpoint in the layout of another framework: kernels (in, out)."""
    generator = torch.Generator().manual_seed(21)
    return [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in ((32, 48), (48, 6))]


def load(model):
    """Rank 0 alone can reach the file; the others get their weights from it."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    if dist.get_rank() == 0:
        for layer, kernel in zip(layers, read_kernels(), strict=True):
            layer.weight.data = kernel.t().contiguous() if RIGHT else kernel.t()
    for layer in layers:
        layer.bias.data.zero_()
        dist.broadcast(layer.weight.data, src=0)  # <- the mistake


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 6))
    load(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(40):
        features = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = F.cross_entropy(model(features), features[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad.contiguous()
            dist.all_reduce(gradient)
            parameter.grad = gradient / world_size
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {loss:.6f}")
    with torch.no_grad():
        features = torch.randn(256, 32, generator=torch.Generator().manual_seed(999))
        print(f"rank {rank} test loss {F.cross_entropy(model(features), features[:, :6].argmax(1)):.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
