"""A row-parallel layer adds its bias before the all-reduce, so it is added once by each rank.

Reported: https://github.com/huggingface/text-generation-inference/issues/1036
          https://github.com/Wenyueh/MinivLLM/pull/81
Wrong: the layer computes Wx + ranks x bias; the model learns around it, and is another one on another number of ranks.
Kind: parallelize
Mesh: tensor=2
Expected: 4 (RowParallel); its bias were added 2 times; along tensor
Reads: every rank the same batch
Right: the bias comes after the all-reduce
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("tensor",)


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


class Sum(torch.autograd.Function):
    """The sum over all ranks; nothing in backward."""

    @staticmethod
    def forward(_ctx, tensor, group):
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


class ColumnParallel(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(linear.weight.detach().chunk(group.size(), 0)[group.rank()].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(group.size(), 0)[group.rank()].clone())

    def forward(self, hidden):
        return F.linear(Copy.apply(hidden, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(linear.weight.detach().chunk(group.size(), 1)[group.rank()].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, hidden):
        if RIGHT:
            return Sum.apply(F.linear(hidden, self.weight), self.group) + self.bias
        return Sum.apply(F.linear(hidden, self.weight, self.bias), self.group)  # <- the mistake


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))


def parallelize(model, mesh):
    group = mesh.get_group("tensor")
    model[2] = ColumnParallel(model[2], group)
    model[4] = RowParallel(model[4], group)
    return model


def inputs(step):
    features = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return features, features[:, :4].argmax(1)


def loss(model, features, labels):
    return F.cross_entropy(model(features), labels)


def terms(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), labels.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(20):
        value = loss(model, *inputs(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"rank {dist.get_rank()} step {step} loss {value:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
