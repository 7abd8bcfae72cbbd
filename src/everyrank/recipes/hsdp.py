"""Hybrid sharding (HSDP): FSDP2 within a group of ranks, replicas of the model between the groups.

Run: torchrun --standalone --nproc-per-node 4 hsdp.py

Holds     a shard of everything on every rank of a group; each group has the whole model among its ranks
Travels   within a group all-gathers and reduce-scatters as in FSDP; between groups an all-reduce of each gradient shard
Use when  the model does not fit on one device, fits on one host, and hosts are connected slower than devices within one

What to change for your own training:
- SHARDS is the number of devices on one host: parameters are gathered inside it, and only the gradients of a rank's
  shard go between hosts. As many as there are ranks is FSDP; 1 is DDP.
- The batch is divided over all ranks: to the data, a replica is as good as a shard.
- Mixed precision, building on the meta device and prefetching: as in fsdp.py.
- The optimizer comes after sharding: fully_shard replaces the parameters, and the old ones train nothing.
- Every rank calls the model equally often, in evaluation too: a forward pass gathers, and waits for all.
"""

import argparse
import csv
import gzip
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
SHARDS = 2  # ranks that hold the model among them; it divides the number of ranks


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
    # With a Subset for each rank some would call the model once more than others, and wait for them forever.
    loader = DataLoader(data, BATCH // world_size, sampler=DistributedSampler(data, shuffle=False))
    num_own = len(range(rank, len(data), world_size))  # after these the sampler repeats some, to make ranks even
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for index, (images, labels) in enumerate(loader):
        hits = model(images.to(device)).argmax(1) == labels.to(device)
        correct += hits[: num_own - index * loader.batch_size].sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size or world_size % SHARDS:
        if rank == 0:
            sys.stderr.write(
                f"{Path(__file__).name}: {world_size} ranks of torchrun: SHARDS={SHARDS} must divide them\n"
            )
        raise SystemExit(2)
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build().to(device, dtype)
    # The axes in this order: ranks 0 and 1 have the shards of one replica, ranks 2 and 3 those of the other.
    mesh = init_device_mesh(device.type, (world_size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is left: the last layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels, reduction="none")
            loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            # Gradients are averaged over all ranks, of both axes: times world_size that is their sum.
            (loss * world_size / size).backward()
            optimizer.step()
            losses[index] = loss.detach() / size

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device)
    # The whole model on rank 0, to save it: a collective, every rank calls it, the others get an empty dict.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        print(f"state_dict {len(state)} tensors")
        print(f"top1 {top1}")
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
