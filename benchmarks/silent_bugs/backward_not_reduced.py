"""Column-parallel layers do not add up the gradient of their input, so all layers below get one rank's part of it.

Reported: https://github.com/NovaSky-AI/SkyRL/pull/1886
          https://github.com/bigcode-project/Megatron-LM/issues/35
Wrong: forward is right; the replicated layers below step with other gradients on each rank, and drift apart.
Kind: parallelize
Mesh: tensor=2
Expected: gradients of; norm.weight; the sum over tensor of norm.weight; mlp (ParallelMLP)
Reads: every rank the same batch
Right: the gradient of the input is all-reduced in backward
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


class ParallelMLP(nn.Module):
    def __init__(self, mlp, group):
        super().__init__()
        self.group, size, rank = group, group.size(), group.rank()
        self.up = nn.Parameter(mlp.up.weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(mlp.down.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, hidden):
        if RIGHT:
            hidden = Copy.apply(hidden, self.group)
        hidden = F.gelu(F.linear(hidden, self.up))  # <- the mistake
        return Sum.apply(F.linear(hidden, self.down), self.group)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, hidden):
        return self.down(F.gelu(self.up(hidden)))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.mlp, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), MLP(), nn.Linear(16, 5)

    def forward(self, words):
        hidden = self.embedding(words).sum(1)
        return self.head(hidden + self.mlp(self.norm(hidden)))


def build():
    torch.manual_seed(0)
    return Tagger()


def parallelize(model, mesh):
    model.mlp = ParallelMLP(model.mlp, mesh.get_group("tensor"))
    return model


def inputs(step):
    words = torch.randint(0, 20, (64, 3), generator=torch.Generator().manual_seed(step))
    return words, words.sum(1) % 5


def loss(model, words, labels):
    return F.cross_entropy(model(words), labels)


def terms(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), labels.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    for step in range(40):
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
