"""Checkpoints that survive a crash: saved by all ranks together, and gone on from in the middle of an epoch.

Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py --stop 25
Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py

The first run ends after 25 updates, as if it had been killed; the second goes on from the last checkpoint, with any
number of ranks, and gets the losses of a run that was never interrupted.

What to change for your own training:
- State: model, optimizer and the number of updates that are done. Order and dropout must follow from seed and update
  alone, as `order` does here; else save the random generators too. A schedule and a GradScaler have a state_dict.
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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
EVERY = 10  # updates between two checkpoints
FOLDER = Path("checkpoints")  # that all hosts share
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster


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
    parser.add_argument("--stop", type=int, help="end after so many updates")
    stop = parser.parse_args().stop
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = load(device, held_out=False)
    model = build().to(device, DTYPE)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    begin = load_newest(model, optimizer, device)

    per_epoch = -(-len(images) // BATCH)
    for update in range(begin, EPOCHS * per_epoch):
        epoch, index = divmod(update, per_epoch)
        if update == begin or index == 0:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch)).to(device)
        batch = order[index * BATCH : (index + 1) * BATCH]
        own = batch.tensor_split(world_size)[rank]
        loss = F.cross_entropy(ddp(images[own]), labels[own], reduction="sum")
        optimizer.zero_grad()
        # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
        (loss * world_size / len(batch)).backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"update {update} loss {total.item() / len(batch)}")
        if (update + 1) % EVERY == 0:
            save(model, optimizer, update + 1, rank)
        if update + 1 == stop:
            break
    else:
        top1 = evaluate(model, rank, world_size, device)
        if rank == 0:
            print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
