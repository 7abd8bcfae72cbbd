"""Parameter averaging: each rank takes a step by itself, then all take the mean of their parameters, in every update.

Run: torchrun --standalone --nproc-per-node 2 parameter_averaging.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   parameters and momentum after every update, in one all-reduce: twice what DDP sends, overlapped with nothing
Use when  hardly ever: to see why DDP averages gradients; every few updates it is local_sgd.py

With SGD, also with momentum and weight decay, it is the same training as DDP: the mean of the steps along the ranks'
gradients is the step along their mean, where each rank counts by its samples. With Adam it is not: its steps are no
linear function of the gradients. Batch norm, clipping and dropout differ, too.

What to change for your own training:
- weight is the number of samples of the rank in this update; of masked targets, count the loss terms.
- The mean needs the optimizer's state as well: with momentum of its own each rank would be off after a ragged batch.
"""

import argparse
import csv
import gzip
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

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


class BatchParts:
    """The indices of this rank's part of every batch: parts are contiguous, and differ in size by one at most."""

    def __init__(self, num_samples, rank, world_size):
        self.num_samples, self.rank, self.world_size, self.epoch = num_samples, rank, world_size, 0

    def __len__(self):
        return -(-self.num_samples // BATCH)

    def __iter__(self):
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(SEED + self.epoch))
        for batch in order.split(BATCH):
            yield batch.tensor_split(self.world_size)[self.rank].tolist()


@torch.no_grad()
def average(model, optimizer, weight):
    """Let every rank have the mean of parameters and momentum; a rank counts by its `weight`, a tensor of no dims."""
    state = [value for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
    tensors = [*model.parameters(), *state]
    flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), weight.new_ones(1)]) * weight
    dist.all_reduce(flat)
    flat /= flat[-1].clone()  # the sum of all weights
    means = flat[:-1].split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


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
    train_data, held_out = load(dtype)
    batches = BatchParts(len(train_data), rank, world_size)
    loader = DataLoader(train_data, batch_sampler=batches, pin_memory=cuda)
    model = build().to(device, dtype)  # seeded: the same weights on every rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        batches.epoch = epoch  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels, reduction="sum")
            optimizer.zero_grad()
            (loss / len(labels)).backward()  # the mean over this rank's own samples
            optimizer.step()
            average(model, optimizer, torch.tensor(len(labels), dtype=dtype, device=device))
            losses[index] = loss.detach() / min(BATCH, len(train_data) - index * BATCH)

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
