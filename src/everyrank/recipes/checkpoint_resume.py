"""Checkpoints that survive a crash: saved by all ranks together, resumed in the middle of an epoch.

Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py --stop 25
Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py

The first run ends after 25 updates, as if it had been killed; the second goes on from the last checkpoint, with any
number of ranks that divides BATCH, and gets the losses of a run that was never interrupted.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; nothing for
          a checkpoint but small messages: each rank writes what it holds, or a share of what all hold
Use when  a run is longer than you can afford to repeat

What to change for your own training:
- State: model, optimizer and the number of updates that are done. Order and dropout must follow from seed and update
  alone, as the order does here; else save the random generators too. A schedule and a GradScaler have a state_dict.
- A checkpoint gets its name when it is whole. Whoever reads it never sees half of one.
- torch.distributed.checkpoint unpickles its table of contents: load what you wrote yourself, nothing from elsewhere.
"""

import argparse
import csv
import gzip
import os
import shutil
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
EVERY = 10  # updates between two checkpoints
FOLDER = Path("checkpoints")  # that all hosts share


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch."""

    num_done = 0  # samples of this rank, in the epoch that was interrupted

    def __iter__(self):
        return islice(super().__iter__(), self.num_done, None)


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


def save(model, optimizer, updates, rank):
    """All ranks write; rank 0 gives the folder its name when every part is on the disk."""
    unfinished, final = FOLDER / "unfinished", FOLDER / f"{updates:06d}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a crash
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # save() returns on every rank when all ranks have written
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(final)


def load_newest(model, optimizer, device):
    """How many updates the newest checkpoint has done, once model and optimizer are as it has them; 0 without one."""
    updates = torch.tensor(max((int(path.name) for path in FOLDER.glob("*") if path.name.isdigit()), default=0))
    updates = updates.to(device)
    dist.broadcast(updates, src=0)  # one rank decides: with two opinions they would wait for each other
    if not updates:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=FOLDER / f"{updates.item():06d}")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return updates.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=int, default=10**9, help="end after so many updates")
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    name, bound = ("cpu:gloo,cuda:nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(name, timeout=timedelta(minutes=5), device_id=bound)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = ResumableSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    updates = load_newest(model, optimizer, device)

    updates_per_epoch = len(loader)
    while updates < min(args.stop, EPOCHS * updates_per_epoch):
        epoch, first = divmod(updates, updates_per_epoch)
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        sampler.num_done = first * loader.batch_size
        for index, (images, labels) in enumerate(loader, first):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(ddp(images), labels, reduction="none")
            loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
            (loss * world_size / size).backward()
            optimizer.step()
            loss = loss.detach() / size
            dist.all_reduce(loss)
            if rank == 0:
                print(f"update {updates} loss {loss.item()}")
            updates += 1
            if updates % EVERY == 0:
                save(model, optimizer, updates, rank)
            if updates == args.stop:
                break
    if updates == EPOCHS * updates_per_epoch:
        top1 = evaluate(model, held_out, rank, world_size, device)
        if rank == 0:
            print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
