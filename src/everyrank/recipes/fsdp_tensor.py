"""Two axes at once: FSDP2 over one axis of the ranks, tensor parallelism over the other.

Run: torchrun --standalone --nproc-per-node 4 fsdp_tensor.py

What to change for your own training:
- The recipe tensor.py, the same network, says how PLAN is made. Cut first, then fully_shard what a rank has left.
- The batch is cut over the shard axis only: ranks of one tensor group read the same samples.
- TENSOR is at most the devices of one host, which talk in every layer; FSDP's gathers can go between hosts.
"""

import csv
import gzip
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
TENSOR = 2  # ranks that cut each layer among them: it divides the number of ranks, and of heads
WIDTH, HEADS, CLIP = 32, 4, 1.0  # CLIP is the largest norm that the gradients may have
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("output", "down")}


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


class Block(nn.Module):
    """Attention between the rows of an image, then two layers on each row: (N, 8, WIDTH) -> (N, 8, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream):
        normed = self.attention_norm(stream)
        # -1 is the number of heads that are on this rank.
        heads = [layer(normed).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads))
        stream = stream + self.output(mixed.transpose(1, 2).flatten(-2))
        return stream + self.down(F.relu(self.up(self.feed_norm(stream))))


def build():
    """A small transformer whose tokens are the rows of an image, (N, 1, 8, 8) -> (N, 10); the same in every process."""
    torch.manual_seed(SEED)
    ends = nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10)
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, WIDTH), Block(), Block(), nn.Flatten(), *ends)


@torch.no_grad()
def clip(gradients):
    """Scale them to a norm of at most CLIP, as one vector; torch's own raises, as they are of several meshes."""
    squares = torch.zeros((), dtype=DTYPE, device=gradients[0].device)
    for gradient in gradients:
        axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        pieces = math.prod(size for size, how in axes if not how.is_replicate())
        # With fewer pieces than ranks, several ranks have the same one, which must count once.
        squares += gradient.to_local().square().sum() * pieces / dist.get_world_size()
    dist.all_reduce(squares)
    for gradient in gradients:
        gradient.to_local().mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


@torch.no_grad()
def evaluate(model, shards, device):
    """The fraction of the held-out images that are read right; each is read by one tensor group."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        own = batch.tensor_split(shards.size())[shards.get_local_rank()]
        right += (model(images[own]).argmax(1) == labels[own]).sum()
    dist.all_reduce(right, group=shards.get_group())
    return right.item() / len(images)


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size or world_size % TENSOR or HEADS % TENSOR:
        if rank == 0:
            why = f"TENSOR={TENSOR} must divide {world_size} ranks of torchrun, {HEADS} heads"
            sys.stderr.write(f"{Path(__file__).name}: {why}\n")
        raise SystemExit(2)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    mesh = init_device_mesh(device.type, (world_size // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    shards, model = mesh["shard"], build().to(device, DTYPE)
    for block in model[2:4]:
        parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)  # what is left: the first and the last layers
    images, labels = load(device, held_out=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)  # after the cuts

    for epoch in range(EPOCHS):
        # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            # Ranks of one tensor group have the same place on the shard axis, and so the same samples.
            own = batch.tensor_split(shards.size())[shards.get_local_rank()]
            loss = F.cross_entropy(model(images[own]), labels[own], reduction="sum")
            optimizer.zero_grad()
            # FSDP averages over its axis. Times its size that is a sum, which the batch's size divides.
            (loss * shards.size() / len(batch)).backward()
            clip([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            sums[index] = loss.detach()

        # Over the shard axis only: all ranks of a tensor group have the loss of the same samples.
        dist.all_reduce(sums, group=shards.get_group())
        if rank == 0:
            for index, total in enumerate(sums.tolist()):
                print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    top1 = evaluate(model, shards, device)
    if rank == 0:
        print(f"top1 {top1}")
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
