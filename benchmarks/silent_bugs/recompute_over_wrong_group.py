"""Activations are kept in parts, and gathered for the recomputation over a group whose ranks do not have those parts.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 4: full recompute)
Wrong: forward and loss are right; backward recomputes from activations in which samples of two replicas are mixed.
Kind: parallelize
Mesh: replicate=2,tensor=2
Expected: in backward; 2 (Recomputed)
Reads: the rows of its replicate rank; tensor ranks the same ones. Needs 4 ranks
Right: gather over the tensor-parallel group, whose ranks hold the parts
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


class Recompute(torch.autograd.Function):
    """Run a function; keep the rank's part of its input alone, and run it again in backward."""

    @staticmethod
    def forward(ctx, hidden, block, split_group, gather_group, *_parameters):
        ctx.block, ctx.group = block, gather_group
        ctx.save_for_backward(hidden.chunk(split_group.size(), -1)[split_group.rank()].clone())
        with torch.no_grad():
            return block(hidden)

    @staticmethod
    def backward(ctx, gradient):
        (part,) = ctx.saved_tensors
        parts = [torch.empty_like(part) for _ in range(ctx.group.size())]
        dist.all_gather(parts, part, group=ctx.group)
        hidden = torch.cat(parts, -1).requires_grad_()
        parameters = list(ctx.block.parameters())
        with torch.enable_grad():
            output = ctx.block(hidden)
        gradients = torch.autograd.grad(output, [hidden, *parameters], gradient)
        return gradients[0], None, None, None, *gradients[1:]


class Recomputed(nn.Module):
    def __init__(self, block, mesh):
        super().__init__()
        self.block = block
        self.groups = mesh.get_group("tensor"), mesh.get_group("tensor" if RIGHT else "replicate")

    def forward(self, hidden):
        return Recompute.apply(hidden, self.block, *self.groups, *self.block.parameters())  # <- the mistake


def build():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), block, nn.Linear(32, 4))


def parallelize(model, mesh):
    model[2] = Recomputed(model[2], mesh)  # the tensor ranks share its memory, not its work
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
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
