"""A norm shared by all heads is replicated while the heads are split, and nobody adds up its gradient.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 11)
          https://github.com/NVIDIA/Megatron-LM/issues/1446
Wrong: each rank's copy of the norm learns from its own heads alone; the copies drift apart.
Kind: parallelize
Mesh: tensor=2
Expected: gradients of attention.head_norm.weight; sum over tensor; the parts are not summed
Reads: every rank the same batch
Right: the gradient of the norm is all-reduced over the tensor ranks
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("tensor",)
VOCABULARY, WIDTH, HEAD = 16, 32, 8


class Attention(nn.Module):
    """Causal self-attention with an RMS norm over each head of queries and keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head_norm = nn.RMSNorm(HEAD)

    def forward(self, hidden):
        q, k, v = (part(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention, self.head = nn.Embedding(VOCABULARY, WIDTH), Attention(), nn.Linear(WIDTH, 16)

    def forward(self, tokens, targets):
        hidden = self.embedding(tokens)
        return F.cross_entropy(self.head(hidden + self.attention(hidden)).flatten(0, 1), targets.flatten())


def build():
    torch.manual_seed(0)
    return LanguageModel()


def parallelize(model, mesh):
    plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
    parallelize_module(model, mesh["tensor"], plan | {"attention.out": RowwiseParallel()})
    group = mesh.get_group("tensor")

    def add_up(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    partial = [model.attention.head_norm.weight] if RIGHT else []  # <- the mistake
    for parameter in partial:
        parameter.register_hook(add_up)
    return model


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (32, 6), generator=generator)
    return tokens, (tokens + tokens.cummax(1)[0]) % VOCABULARY


def loss(model, tokens, targets):
    return model(tokens, targets)


def terms(mean, targets):
    return mean * targets.numel(), targets.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)
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
