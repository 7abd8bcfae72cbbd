"""The outputs of a column-parallel layer are gathered over the data-parallel group, whose ranks hold other samples.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 6: cross-attention)
Wrong: shapes fit, as both groups have two ranks; half of each hidden vector belongs to a sample of another replica.
Kind: parallelize
Mesh: replicate=2,tensor=2
Expected: 2 (ColumnParallel); of samples 16 to 31; gathered over a different axis
Reads: the rows of its replicate rank; tensor ranks the same ones. Needs 4 ranks
Right: gather over the tensor-parallel group
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("replicate", "tensor")


class Copy(torch.autograd.Function):
    """Nothing in forward; backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Gather(torch.autograd.Function):
    """The parts of all ranks behind each other; each rank's gradient is its part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group, part = group, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class ColumnParallel(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.group = mesh.get_group("tensor")
        self.gather_group = mesh.get_group("tensor" if RIGHT else "replicate")
        self.weight = nn.Parameter(linear.weight.detach().chunk(self.group.size())[self.group.rank()].clone())

    def forward(self, hidden):
        own = F.linear(Copy.apply(hidden, self.group), self.weight)
        return Gather.apply(own, self.gather_group)  # <- the mistake


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 4))


def parallelize(model, mesh):
    model[2] = ColumnParallel(model[2], mesh)
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("replicate"))
    ddp.rows = slice(mesh.get_local_rank("replicate"), None, mesh["replicate"].size())
    return ddp


def inputs(step):
    features = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return features, features[:, :4].argmax(1)


def loss(model, features, labels):
    rows = getattr(model, "rows", slice(None))
    return F.cross_entropy(model(features[rows]), labels[rows])


def terms(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), labels.numel()


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2) if size > 1 else (1, 1), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(32):
        value = loss(model, *inputs(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 8 == 7:
            print(f"rank {dist.get_rank()} step {step} loss {value:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
