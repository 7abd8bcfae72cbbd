"""Training that torchrun restarts when a rank dies: it resumes from its last checkpoint, on the ranks there are.

Run: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
Run: torchrun --standalone --nproc-per-node 2 --max-restarts 3 elastic_torchrun.py --fail-at 25

Here rank 1 kills itself once, at update 25. torchrun ends all ranks and starts new ones; the losses stay the same.

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; after a
          restart the checkpoint, broadcast from rank 0
Use when  hosts come and go (spot instances), or a run is so long that some host will fail

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
from torch.utils.data import DataLoader, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
EVERY = 10  # updates between two checkpoints
CHECKPOINT = Path("elastic.pt")  # removed when the training is over; where it stays, the next one goes on from it


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


def batches(num_samples, rank, world_size, begin):
    """This rank's part of each batch, as lists of indices, from update `begin` to the end of the training."""
    # Not DistributedSampler: it begins with an epoch, and the ranks that are left need not divide BATCH.
    updates_per_epoch = -(-num_samples // BATCH)
    for epoch in range(begin // updates_per_epoch, EPOCHS):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(BATCH)[max(0, begin - epoch * updates_per_epoch) :]:
            yield batch.tensor_split(world_size)[rank].tolist() or [0]  # an empty part borrows a sample


def save(**state):
    """Write to another name first, so that CHECKPOINT is a whole file at every moment."""
    partial = CHECKPOINT.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(CHECKPOINT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-at", type=int, help="rank 1 dies at this update, the first time")
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    fail_at = args.fail_at if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        sys.exit("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun: else ranks hang after a restart")
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, held_out = load(dtype)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    updates_per_epoch = -(-len(train_data) // BATCH)
    losses = torch.zeros(EPOCHS * updates_per_epoch, dtype=torch.float64, device=device)  # of each update

    # Rank 0 reads, all get the same: with two opinions of where to go on they would wait for each other.
    box = [torch.load(CHECKPOINT, "cpu", weights_only=True) if rank == 0 and CHECKPOINT.exists() else None]
    dist.broadcast_object_list(box)
    begin = box[0]["updates"] if box[0] else 0
    if box[0]:
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
        losses.copy_(box[0]["losses"])
        print(f"rank {rank} of {world_size} goes on from update {begin}", file=sys.stderr)

    saved = begin
    sampler = batches(len(train_data), rank, world_size, begin)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    for update, (images, labels) in enumerate(loader, begin):
        if update == fail_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(ddp(images), labels, reduction="none")
        size = min(BATCH, len(train_data) - update % updates_per_epoch * BATCH)  # of the batch of all ranks
        loss = loss[: size // world_size + (rank < size % world_size)].sum()  # a borrowed sample does not count
        optimizer.zero_grad()
        # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
        (loss * world_size / size).backward()
        optimizer.step()
        losses[update] = loss.detach() / size
        if (update + 1) % EVERY == 0 or update + 1 == len(losses):
            dist.all_reduce(losses[saved : update + 1])  # those before are added up already, maybe by other ranks
            saved = update + 1
            if rank == 0:
                save(model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses, updates=saved)

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        for update, loss in enumerate(losses.tolist()):
            print(f"update {update} loss {loss}")
        print(f"top1 {top1}")
        CHECKPOINT.unlink()
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
