"""DDP gets the data-parallel group, and the ranks that share a sequence between them are not in it.

Reported: https://github.com/ByteDance-Seed/VeOmni/pull/1115
          https://github.com/ByteDance-Seed/VeOmni/issues/1059
Wrong: with one replica the group has one rank, and averages nothing: each rank steps for its part of the sequence.
Kind: parallelize
Mesh: replicate=1,context=2
Expected: gradients of all tensors; the mean over context; they are not averaged
Reads: its positions of all sequences; its loss is the mean over them
Right: the group of all ranks that read other samples or other positions
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
AXES = ("replicate", "context")
VOCABULARY, WIDTH, LENGTH = 12, 32, 24


class Gather(torch.autograd.Function):
    """The parts of all ranks behind each other; backward adds up what the ranks want of each part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group, part = group, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def own(self, tensor):
        return tensor.chunk(self.group.size(), -1)[self.group.rank()] if self.group else tensor

    def forward(self, tokens, targets):
        positions = self.own(torch.arange(LENGTH))
        hidden = self.tokens(tokens) + self.positions(positions)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        if self.group:
            key, value = Gather.apply(key, self.group), Gather.apply(value, self.group)
        mask = positions[:, None] >= torch.arange(LENGTH)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def build():
    torch.manual_seed(0)
    return Decoder()


def parallelize(model, mesh):
    model.group = mesh.get_group("context")
    data_parallel = None if RIGHT else mesh.get_group("replicate")
    ddp = DistributedDataParallel(model, process_group=data_parallel)  # <- the mistake
    own = LENGTH // model.group.size()
    ddp.columns = slice(own * model.group.rank(), own * (model.group.rank() + 1))
    return ddp


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, VOCABULARY, (8, 1), generator=generator) + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, tokens, targets):
    columns = getattr(model, "columns", slice(None))
    return model(tokens[:, columns], targets[:, columns])


def terms(mean, targets):
    return mean * targets.numel(), targets.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    for step in range(24):
        value = loss(model, *inputs(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 6 == 5:
            print(f"rank {dist.get_rank()} step {step} loss {value:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
