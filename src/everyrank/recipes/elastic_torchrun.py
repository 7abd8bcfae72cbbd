"""Training that torchrun starts again when a rank dies: it goes on from its last checkpoint, on the ranks there are.

Run: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
Run: torchrun --standalone --nproc-per-node 2 --max-restarts 3 elastic_torchrun.py --fail-at 25

Here rank 1 kills itself once, at update 25. torchrun ends all ranks and starts new ones; the losses stay the same.

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks, so that their number may change.
- On several hosts: --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id 7, the same on all. When one
  leaves, the others go on, if two are left; when one comes, all begin again from the checkpoint with it.
- CHECKPOINT is on storage that all hosts share: rank 0 reads and writes it, and may be another host after a restart.
- What is not in the checkpoint begins anew: add schedule, GradScaler and the random generators that you draw from.
- The variable gives each start a store of its own. In torchrun's, which outlives its ranks, new ones find addresses
  of dead ones, and fail or hang (pytorch issue 135712).
- A restart repeats what came after the last checkpoint. It cures no mistake of the script: --max-restarts ends those.
"""

import argparse
import csv
import gzip
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
EVERY = 10  # updates between two checkpoints
CHECKPOINT = Path("elastic.pt")  # removed when the training is over; where it stays, the next one goes on from it


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


def save(**state):
    """At every moment the name is that of a whole file, which was on the disk before it got it."""
    partial = CHECKPOINT.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(CHECKPOINT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-at", type=int, help="rank 1 dies at this update, the first time")
    fail_at = parser.parse_args().fail_at if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        sys.exit("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun: else ranks hang after a restart")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = load(device, held_out=False)
    model = build().to(device, DTYPE)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    updates_per_epoch = -(-len(images) // BATCH)
    sums = torch.zeros(EPOCHS * updates_per_epoch, dtype=torch.float64, device=device)  # the loss of each update

    # Rank 0 reads, all get the same: with two opinions of where to go on they would wait for each other.
    box = [torch.load(CHECKPOINT, "cpu", weights_only=True) if rank == 0 and CHECKPOINT.exists() else None]
    dist.broadcast_object_list(box)
    begin = box[0]["updates"] if box[0] else 0
    if box[0]:
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
        sums.copy_(box[0]["sums"])
        print(f"rank {rank} of {world_size} goes on from update {begin}", file=sys.stderr)

    saved = begin
    for update in range(begin, len(sums)):
        epoch, index = divmod(update, updates_per_epoch)
        if update == begin or index == 0:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch)).to(device)
        if update == fail_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = order[index * BATCH : (index + 1) * BATCH]
        own = batch.tensor_split(world_size)[rank]
        loss = F.cross_entropy(ddp(images[own]), labels[own], reduction="sum")
        optimizer.zero_grad()
        # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
        (loss * world_size / len(batch)).backward()
        optimizer.step()
        sums[update] = loss.detach()
        if (update + 1) % EVERY == 0 or update + 1 == len(sums):
            dist.all_reduce(sums[saved : update + 1])  # those before are added up already, maybe by other ranks
            saved = update + 1
            if rank == 0:
                save(model=model.state_dict(), optimizer=optimizer.state_dict(), sums=sums, updates=saved)

    top1 = evaluate(model, rank, world_size, device)
    if rank == 0:
        for update, total in enumerate(sums.tolist()):
            print(f"update {update} loss {total / min(BATCH, len(images) - update % updates_per_epoch * BATCH)}")
        print(f"top1 {top1}")
        CHECKPOINT.unlink()
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
