"""Distributed data parallel with Horovod: its own ranks, its own all-reduce, and an optimizer that sums gradients.

Run: horovodrun -np 2 --gloo python horovod_ddp.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   each gradient: summed over ranks by all-reduce while backward still runs, those together that are ready
Use when  your cluster has Horovod, and horovodrun is how jobs start on it

What to change for your own training:
- load() and build() are your data and your network. BATCH is that of all ranks. Batch norm needs hvd.SyncBatchNorm.
- op=hvd.Sum, and the loss over the size of the whole batch. The default averages: the last batch, of which ranks have
  unequal parts, then weighs wrongly, and so do masked targets.
- After rank 0 has read a checkpoint: hvd.broadcast_parameters, and hvd.broadcast_optimizer_state(optimizer, 0). Not for
  a new optimizer: to have a state to send, that makes a step, which decays the weights and counts as Adam's first.
- Several backwards in an update: backward_passes_per_step=N, and only the last of them sends.
- --fp16 sends half the bytes, and rounds each gradient to 11 bits: another training, if a close one.
- On several hosts: horovodrun -np 8 -H a:4,b:4, which reaches them by ssh.
- Do not call your script horovod.py: it would import itself.
"""

import argparse
import csv
import gzip
import os
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0


def load(dtype):
    """Real handwritten digits for training and, every fifth, held out: images (1, 8, 8) from 0 to 1, and labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    held_out = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


@torch.no_grad()
def evaluate(model, data, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(hvd.rank(), len(data), hvd.size()))  # DistributedSampler would count some images twice
    correct = torch.zeros(1, dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    correct = hvd.allreduce(correct, op=hvd.Sum, name="correct")  # sums, not the average of each rank's fraction
    model.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    parser.add_argument("--fp16", action="store_true", help="send gradients as fp16")
    arguments = parser.parse_args()
    dtype = torch.float64 if arguments.float64 else torch.float32
    hvd.init()  # ranks and addresses come from horovodrun, in the environment
    rank, world_size = hvd.rank(), hvd.size()
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // hvd.local_size()))  # else each rank starts one for every core

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, world_size, rank, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16 else hvd.Compression.none,
        op=hvd.Sum,
    )

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels, reduction="none")
            loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            (loss / size).backward()  # the sum of this over the ranks is the mean over the batch
            optimizer.step()  # waits for the sums of all gradients
            losses[index] = loss.detach() / size

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        losses = hvd.allreduce(losses, op=hvd.Sum, name="losses")
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, device)
    if rank == 0:
        print(f"top1 {top1}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
