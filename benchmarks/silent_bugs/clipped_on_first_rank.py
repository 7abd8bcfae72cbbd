"""Gradients to clip are chosen with the rule for the norm, so replicated parameters are clipped on tensor rank 0 alone.

Reported: https://github.com/microsoft/DeepSpeed/pull/1801
          https://github.com/OrderLab/TrainCheck-Evaluation-Workloads (deepspeed-1801)
Wrong: the copies of the layer norms take steps of different lengths, and drift apart, as in the training of BLOOM-176B.
Kind: script
Expected: replicas.drift
Right: the rule is for the norm; all gradients are clipped
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RIGHT = "--right" in sys.argv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 96, bias=False), nn.Linear(96, 24, bias=False)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_gradients(model, for_clipping):
    """Split parameters of every rank, replicated ones of rank 0: together each number once."""
    gradients = []
    for parameter in model.parameters():
        is_split = isinstance(parameter, DTensor)
        if (RIGHT and for_clipping) or is_split or dist.get_rank() == 0:  # <- the mistake
            gradients.append(local(parameter.grad))
    return gradients


def clip_gradients(model, largest):
    squares = sum(gradient.square().sum() for gradient in get_gradients(model, for_clipping=False))
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if norm > largest:
        for gradient in get_gradients(model, for_clipping=True):
            gradient.mul_(largest / norm)
    return norm


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 6))
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    for step in range(30):
        features = torch.randn(48, 24, generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(features), features[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model, 0.3)
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {loss:.6f} gradient norm {norm:.6f}")
    print(f"rank {rank} sum of a layer norm {model[0].norm.weight.sum():.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
