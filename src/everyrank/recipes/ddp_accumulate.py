"""Distributed data parallel with gradient accumulation: a batch too large for the devices, in micro-batches.

Run: torchrun --standalone --nproc-per-node 2 ddp_accumulate.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, in the last micro-batch only
Use when  the activations of the batch do not fit on the devices together

What to change for your own training:
- ACCUMULATE: more micro-batches need less memory; the losses stay the same, because BATCH does.
- Divide by the size of the whole batch. A mean over each micro-batch, divided by ACCUMULATE, is another training
  as soon as they differ in size, or in how many of their targets are masked.
- With batch norm each micro-batch has its own statistics: accumulation is then another training.
"""

import argparse
import csv
import gzip
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
ACCUMULATE = 4  # micro-batches of one update


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
def evaluate(model, data, rank, world_size, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % (world_size * ACCUMULATE):
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks times ACCUMULATE={ACCUMULATE} must divide it")

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    micro_batch = BATCH // (world_size * ACCUMULATE)  # samples of a rank in one micro-batch
    loader = DataLoader(train_data, micro_batch, sampler=sampler, pin_memory=cuda)
    num_updates = -(-len(loader) // ACCUMULATE)  # of an epoch, the last one smaller
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(num_updates, dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            update = index // ACCUMULATE  # of this epoch
            size = min(BATCH, len(train_data) - update * BATCH)  # of the whole batch: the last one is smaller
            is_last = (index + 1) % ACCUMULATE == 0 or index + 1 == len(loader)
            # The last micro-batch sends the gradients that all of them have added up. no_sync has to be entered
            # before the forward pass: that is where DDP decides whether backward will send.
            with nullcontext() if is_last else ddp.no_sync():
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                loss = F.cross_entropy(ddp(images), labels, reduction="none")
                loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
                # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
                (loss * world_size / size).backward()
            losses[update] += loss.detach() / size
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * num_updates + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
