"""The router's output leaves DTensor without saying that its gradient is one rank's part of a sum.

Reported: https://github.com/pytorch/torchtitan/issues/2387
          https://github.com/pytorch/torchtitan/pull/4054
Wrong: the experts are split over the ranks, each rank's gradient of the router is a part, and they are never added up.
Kind: parallelize
Mesh: tensor=2
Expected: the sum over tensor of router.weight; the parts are not summed
Reads: every rank the same batch
Right: to_local(grad_placements=[Partial()])
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("tensor",)
WIDTH, HIDDEN, EXPERTS = 16, 32, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)

    def forward(self, tokens, weights):
        hidden = F.silu(torch.einsum("nw,ewh->neh", tokens, self.up))
        return torch.einsum("neh,ehw,ne->nw", hidden, self.down, weights)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(12, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 4)

    def forward(self, features):
        hidden = self.first(features)
        return self.head(self.experts(hidden, self.router(hidden).softmax(-1)))


def build():
    torch.manual_seed(0)
    return Classifier()


def parallelize(model, mesh):
    mesh, experts = mesh["tensor"], model.experts
    size, rank = mesh.size(), mesh.get_local_rank()
    experts.up = nn.Parameter(experts.up.detach().chunk(size, 2)[rank].clone())
    experts.down = nn.Parameter(experts.down.detach().chunk(size, 1)[rank].clone())

    def enter(_, args):  # each rank's gradient of the tokens is a part of a sum
        return DTensor.from_local(args[0], mesh, [Replicate()]).to_local(grad_placements=[Partial()]), args[1]

    def leave(_, __, output):
        return DTensor.from_local(output, mesh, [Partial()]).full_tensor()

    def enter_router(_, args, __):
        return DTensor.from_local(args[0], mesh, [Replicate()])

    def leave_router(_, output, __):
        return output.to_local(grad_placements=[Partial()] if RIGHT else None)  # <- the mistake

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)
    distribute_module(model.router, mesh, input_fn=enter_router, output_fn=leave_router)
    return model


def inputs(step):
    features = torch.randn(64, 12, generator=torch.Generator().manual_seed(step))
    return features, (features[:, :4] * features[:, 4:5].sign()).argmax(1)


def loss(model, features, labels):
    return F.cross_entropy(model(features), labels)


def terms(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), labels.numel()


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
