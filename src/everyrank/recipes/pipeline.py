"""Pipeline parallelism: each rank has some of the layers, and the batch passes through in pieces (1F1B).

Run: torchrun --standalone --nproc-per-node 2 pipeline.py

What to change for your own training:
- build() gives the pieces in their order, of which a stage has one or several; the slowest stage sets the pace. What
  passes between them is one tensor, a row for each sample. A weight that two stages use needs its gradients added up.
- MICRO_BATCHES: of p stages each idles (p - 1) / (MICRO_BATCHES + p - 1) of the time. They may differ in size, where
  the schedules in torch.distributed.pipelining want all of one size. With batch norm it is another training.
"""

import csv
import gzip
import os
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

EPOCHS = 2
BATCH = 64  # samples of one update
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
MICRO_BATCHES = 7  # of 10 samples and six times 9


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), in pieces; the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))]


class Stage:
    """The pieces of this rank, between the stages before and behind."""

    def __init__(self, rank, world_size, device):
        pieces = build()  # all of them on every rank, so that all draw the same weights
        own = [place for place in range(len(pieces)) if place * world_size // len(pieces) == rank]
        # What arrives for a sample has the shape that the pieces before give it: no message has to say it.
        self.shape = nn.Sequential(*pieces[: own[0]])(torch.zeros(1, 1, 8, 8)).shape[1:]
        self.layers = nn.Sequential(*(pieces[place] for place in own)).to(device, DTYPE)
        self.rank, self.num_behind = rank, world_size - 1 - rank
        # A group for each direction: on NCCL, what two ranks send each other in one group waits in one queue.
        self.down, self.up = dist.new_group(), dist.new_group()

    def forward(self, images):
        """The input and the output for these samples, and the message that takes it to the stage behind."""
        if self.rank:
            images = torch.empty(len(images), *self.shape, dtype=DTYPE, device=images.device)
            dist.recv(images, self.rank - 1, self.down)
            images.requires_grad_(torch.is_grad_enabled())
        output = self.layers(images)
        # Not send, which waits for the other: that one may be waiting to send a gradient to this rank.
        sending = dist.isend(output.detach().contiguous(), self.rank + 1, self.down) if self.num_behind else None
        return images, output, sending

    def backward(self, images, output, sending):
        """Adds to the gradients of the parameters, and sends that of the input to the stage before."""
        gradient = None  # the last stage's output is the loss
        if self.num_behind:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1, self.up)
            sending.wait()  # takes no time: its gradient has come back
        output.backward(gradient)
        if self.rank:
            dist.send(images.grad, self.rank - 1, self.up)

    def train(self, images, labels, batch):
        """Adds the gradients of the mean over a batch; the sum of its losses on the last stage, elsewhere 0."""
        total, running, micro_batches = 0, deque(), iter(batch.tensor_split(MICRO_BATCHES))
        # Forward once for each stage behind, then both in turn: never more than that many, and one, are in memory.
        ahead = min(self.num_behind, MICRO_BATCHES)
        for step in "F" * ahead + "FB" * (MICRO_BATCHES - ahead) + "B" * ahead:
            if step == "B":
                self.backward(*running.popleft())
                continue
            own = next(micro_batches)
            inputs, output, sending = self.forward(images[own])
            if not self.num_behind:
                loss = F.cross_entropy(output, labels[own], reduction="sum")
                total += loss.detach()
                output = loss / len(batch)  # of all micro-batches: their gradients add up to that of the mean
            running.append((inputs, output, sending))
        return total


@torch.no_grad()
def evaluate(stage, device):
    """The fraction of the held-out images that are read right, which the last stage knows."""
    images, labels = load(device, held_out=True)
    stage.layers.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        _, output, sending = stage.forward(images[batch])
        if sending:
            sending.wait()
        else:
            right += (output.argmax(1) == labels[batch]).sum()
    dist.all_reduce(right)
    return right.item() / len(images)


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    most = len(build())
    if not 1 <= world_size <= most:
        if rank == 0:
            sys.stderr.write(
                f"{Path(__file__).name}: {world_size} ranks of torchrun: give 1 to {most}, of which each has a piece\n"
            )
        raise SystemExit(2)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    images, labels = load(device, held_out=False)  # the first stage reads the images, the last one the labels
    stage = Stage(rank, world_size, device)
    optimizer = torch.optim.SGD(stage.layers.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            sums[index] = stage.train(images, labels, batch)
            optimizer.step()

        dist.all_reduce(sums)  # from the last stage, which has them, to rank 0; the others add 0
        if rank == 0:
            for index, total in enumerate(sums.tolist()):
                print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    top1 = evaluate(stage, device)
    if rank == 0:
        print(f"top1 {top1}")
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
