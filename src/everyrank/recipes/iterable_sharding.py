"""A stream over ranks and data loader workers: every sample is read once, whatever their numbers.

Run: torchrun --standalone --nproc-per-node 2 iterable_sharding.py

An IterableDataset is copied into every worker of every rank. Nobody divides it: that is done here, in `Stream`, and
what is easily wrong is dividing it not at all (every reader yields everything), by rank alone (workers repeat each
other), or twice. Here sample i of an epoch belongs to update i // BATCH, so the losses are those of one process.

What to change for your own training:
- __iter__ goes through your source in its own order; each reader goes past what is not its own. Decode after that.
- The order of an epoch has to reach the workers: they are started anew for each epoch, after set_epoch. With
  persistent_workers=True they would keep the first epoch's order for ever.
- Ranks must make equally many updates, or they wait for each other until the timeout. Dividing every batch over all
  ranks, as here, does that for any length; files given to ranks whole do not.
"""

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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
WORKERS = 2  # data loader processes of each rank
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster


class Stream(IterableDataset):
    """Batches of this reader: of every update the rank's part, and of those the updates that are this worker's."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        images, labels = load("cpu", held_out=False)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + self.epoch))
        worker = get_worker_info()
        for update, batch in enumerate(order.split(BATCH)):
            # The DataLoader takes one item from each worker in turn, so update u has to come from worker u % WORKERS.
            if worker is None or update % worker.num_workers == worker.id:
                own = batch.tensor_split(self.world_size)[self.rank]
                yield images[own], labels[own], len(batch)


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


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
def evaluate(model, rank, world_size, device):
    """The fraction of the held-out images that are read right; each is read by one rank, none is repeated."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        own = batch.tensor_split(world_size)[rank]
        right += (model(images[own]).argmax(1) == labels[own]).sum()
    dist.all_reduce(right)
    return right.item() / len(images)


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    stream = Stream(rank, world_size)
    loader = DataLoader(stream, batch_size=None, num_workers=WORKERS)  # the stream makes the batches itself
    model = build().to(device, DTYPE)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    update = 0
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)  # before the loader starts its workers
        sums, sizes = [], []
        for images, labels, size in loader:
            loss = F.cross_entropy(ddp(images.to(device)), labels.to(device), reduction="sum")
            optimizer.zero_grad()
            # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
            (loss * world_size / size).backward()
            optimizer.step()
            sums.append(loss.detach())
            sizes.append(size)

        # The losses are added up over ranks here, once an epoch: in the loop it would hold up every update.
        totals = torch.stack(sums)
        dist.all_reduce(totals)
        for total, size in zip(totals.tolist(), sizes, strict=True):
            if rank == 0:
                print(f"update {update} loss {total / size}")
            update += 1

    top1 = evaluate(model, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
