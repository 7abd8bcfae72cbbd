"""A stream (IterableDataset) over ranks and DataLoader workers: every sample is read once, whatever their numbers.

Run: torchrun --standalone --nproc-per-node 2 iterable_sharding.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  samples arrive in order and cannot be picked by index (tar files, a queue), so that no sampler can divide them

An IterableDataset is copied into every worker of every rank, and nothing divides it unless its __iter__ does, as here.
Easily wrong: not dividing it at all (every reader yields everything), by rank alone (workers repeat each other), or
twice. Here sample i of an epoch belongs to update i // BATCH, so the losses are those of one process.

What to change for your own training:
- __iter__ goes through your source in its own order; each reader skips what is not its own. Decode after that.
- The order of an epoch has to reach the workers: they are started anew for each epoch, after set_epoch. With
  persistent_workers=True they would keep the first epoch's order for ever.
- Ranks must make equally many updates, or they wait for each other until the timeout. Dividing every batch over all
  ranks, as here, does that for any length; files given to ranks whole do not.
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
WORKERS = 2  # data loader processes of each rank
SEED = 0


class Stream(IterableDataset):
    """Batches of this reader: of every update the rank's part, and of those the updates that are this worker's."""

    def __init__(self, data, rank, world_size):
        self.data, self.rank, self.world_size, self.epoch = data, rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(SEED + self.epoch))
        worker = get_worker_info()
        for update, batch in enumerate(order.split(BATCH)):
            # The DataLoader takes one item from each worker in turn, so update u has to come from worker u % WORKERS.
            if worker is None or update % worker.num_workers == worker.id:
                images, labels = self.data[batch.tensor_split(self.world_size)[self.rank]]
                yield images, labels, len(batch)


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
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, held_out = load(dtype)
    stream = Stream(train_data, rank, world_size)
    # No batch_size: the stream makes the batches itself.
    loader = DataLoader(stream, batch_size=None, num_workers=WORKERS, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    update = 0
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)  # before the loader starts its workers
        losses = []
        for images, labels, size in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(ddp(images), labels, reduction="sum")
            optimizer.zero_grad()
            # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
            (loss * world_size / size).backward()
            optimizer.step()
            losses.append(loss.detach() / size)

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        for loss in losses.tolist():
            if rank == 0:
                print(f"update {update} loss {loss}")
            update += 1

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
