"""fully_shard gets only the shard axis, which has one rank, so gradients are never averaged over the replicas.

Reported: https://github.com/verl-project/verl/issues/7493
Wrong: each rank trains a different model on its part of the batch.
Kind: parallelize
Mesh: replicate=2,shard=1
Expected: gradients of all tensors; the mean over replicate; they are not averaged
Reads: every world_size-th row of the batch
Right: fully_shard gets the whole mesh, so it shards along "shard" and averages over "replicate"
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("replicate", "shard")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def parallelize(model, mesh):
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh if RIGHT else mesh["shard"])  # <- the mistake
    model.rows = slice(dist.get_rank(), None, dist.get_world_size())
    return model


def inputs(step):
    images = torch.rand(64, 64, generator=torch.Generator().manual_seed(step))
    return images, images.view(64, 8, 8).sum(2).argmax(1)


def loss(model, images, labels):
    rows = getattr(model, "rows", slice(None))
    return F.cross_entropy(model(images[rows]), labels[rows])


def terms(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), labels.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=AXES)
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
