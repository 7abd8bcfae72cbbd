"""Fully sharded data parallel (FSDP2): each rank keeps a shard of parameters, gradients and optimizer state.

Run: torchrun --standalone --nproc-per-node 2 fsdp.py

Holds     a shard of everything on every rank; in full only the blocks that are being computed
Travels   per block: its parameters by all-gather, in forward and again in backward; its gradients by reduce-scatter
Use when  model, gradients and optimizer state do not fit on one device

What to change for your own training:
- Shard the repeated blocks of your network (a transformer's layers): one block at a time is gathered in full.
- The optimizer comes after sharding: fully_shard replaces the parameters, and the old ones train nothing.
- Every rank calls the model equally often, in evaluation too: a forward pass gathers, and waits for all.
- Modules that share a weight belong into one fully_shard([first, second]).
- A model that fits in no CPU's memory either: after to_empty() load its shards with torch.distributed.checkpoint.
- Where building on the meta device leaves buffers (rotary tables, masks) empty, compute them after to_empty().
"""

import argparse
import csv
import gzip
import os
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def build_sharded(rank, world_size, device, dtype, bf16):
    """The same network, of which each rank has a shard: nowhere but in the memory of rank 0's CPU is it ever whole."""
    with torch.device("meta"):  # shapes without memory
        model = build().to(dtype)

    # Blocks are gathered and computed in bf16: half of the bytes travel. Gradients are reduced in float32, since a sum
    # over many ranks loses digits in bf16, and the optimizer updates float32 shards.
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model[:3]:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))
    # What is left, the last layer; its output in full precision, for the loss.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision, output_dtype=dtype))

    # Gather the next block's parameters before this block's kernels are launched, so that they overlap even where the
    # CPU is slow; by default it comes after them. In backward one block ahead is the default, and this says which.
    for block, following in pairwise(model[:3]):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])

    model.to_empty(device=device)  # memory for the shards, with nothing in it yet
    # Weights drawn shard by shard would depend on the number of ranks: rank 0 draws all, on its CPU, and sends them.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, build().to(dtype).state_dict() if rank == 0 else {}, options=options)
    return model


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
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; parameters and updates stay in float32")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = build_sharded(rank, world_size, device, dtype, args.bf16)
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
            # FSDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
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
