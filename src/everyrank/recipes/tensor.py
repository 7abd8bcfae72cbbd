"""Tensor parallelism: each rank holds a part of every large layer, and all ranks compute the same batch together.

Run: torchrun --standalone --nproc-per-node 2 tensor.py

`python tensor.py` trains the same network whole, in one process: the losses are the same.

What to change for your own training:
- PLAN names the layers of your network in pairs: cut by columns what goes wide, by rows what comes back. Between the
  two nothing is sent; after the second the ranks add up what each has. All other layers are whole on every rank.
- Count the heads from the width that arrives, as here: a number of heads written into forward is silently wrong.
- So is one fused layer for query, key and value: cut by columns, a rank gets other parts than its own heads'.
- parallelize_module unties tied weights without a word: tie them again behind it.
- Every rank reads the same samples in the same order. Dropout outside the pairs needs the same seed on all ranks.
"""

import csv
import gzip
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

EPOCHS = 2
BATCH = 64  # samples of one update
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
WIDTH, HEADS = 32, 4  # the number of ranks divides the heads
CLIP = 1.0  # the largest norm that the gradients may have
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
def clip(gradients, world_size):
    """Scale the gradients until their norm, as one vector over all ranks, is at most CLIP."""
    # torch's clip_grad_norm_ raises where some gradients are cut (DTensor) and others are not.
    cut = [isinstance(gradient, DTensor) and gradient.placements[0].is_shard() for gradient in gradients]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]  # views
    # What is whole is on every rank, and must count once.
    squares = sum(part.square().sum() / (1 if is_cut else world_size) for part, is_cut in zip(own, cut, strict=True))
    if world_size > 1:
        dist.all_reduce(squares)
    for part in own:
        part.mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


@torch.no_grad()
def evaluate(model, device):
    """The fraction of the held-out images that are read right: every rank comes to the same."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        right += (model(images[batch]).argmax(1) == labels[batch]).sum()
    return right.item() / len(images)


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % world_size:
        if rank == 0:
            sys.stderr.write(f"{Path(__file__).name}: {HEADS} heads cannot be cut over {world_size} ranks evenly\n")
        raise SystemExit(2)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    model = build().to(device, DTYPE)
    if world_size > 1:
        if cuda:
            torch.cuda.set_device(device)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
        mesh = init_device_mesh(device.type, (world_size,))
        for block in model[2:4]:
            parallelize_module(block, mesh, PLAN)
    images, labels = load(device, held_out=False)
    # After cutting, which replaces the parameters. foreach takes cut and whole ones in one call, and raises.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, foreach=False)

    for epoch in range(EPOCHS):
        # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
            optimizer.zero_grad()
            (loss / len(batch)).backward()
            clip([parameter.grad for parameter in model.parameters()], world_size)
            optimizer.step()
            sums[index] = loss.detach()

        # Every rank has the loss of the whole batch. Added up over ranks it would count several times.
        if rank == 0:
            for index, total in enumerate(sums.tolist()):
                print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    top1 = evaluate(model, device)
    if rank == 0:
        print(f"top1 {top1}")
    if world_size > 1:
        time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
