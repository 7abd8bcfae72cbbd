"""Hybrid sharding (HSDP): FSDP2 within each group of ranks, and a replica of the model in each group.

Run: torchrun --standalone --nproc-per-node 4 hsdp.py

Memory         a shard of everything on every rank; the ranks of a group have the whole model together
Communication  within a group, all-gathers and reduce-scatters as in FSDP; between groups, an all-reduce of each
               gradient shard
Use when       the model fits on one host but not on one device, and the network between hosts is slow

What to change for your own training:
- Set SHARDS to the number of devices of a host. Parameters are then gathered within hosts, and only gradient shards
  are sent between hosts. With SHARDS = number of ranks it is FSDP, with SHARDS = 1 it is DDP.
- The batch is divided over all ranks, on both axes of the mesh.
- For mixed precision, the meta device and prefetching, see fsdp.py.
- Create the optimizer after sharding. fully_shard replaces the parameters, so an earlier optimizer trains nothing.
- Call the model equally often on every rank, also in evaluation: each forward pass waits for all ranks.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, count_correct, load, print_losses
from transformer import build

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
CLIP = 1.0  # maximum norm of the gradients
SHARDS = 2  # ranks that share one replica of the model; it divides the number of ranks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size or world_size % SHARDS:
        if rank == 0:
            sys.stderr.write(f"{Path(__file__).name}: SHARDS={SHARDS} has to divide the {world_size} ranks\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    # With 4 ranks and SHARDS=2, ranks 0 and 1 have the shards of one replica, ranks 2 and 3 of the other.
    mesh = init_device_mesh(device.type, (world_size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    for axis in mesh.mesh_dim_names:  # groups of a mesh do not inherit the timeout
        mesh.get_group(axis).set_timeout(timedelta(minutes=5))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # shards the first and last layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # FSDP divides the sum over the ranks of both axes by world_size
            clip_grad_norm_(model.parameters(), CLIP)  # uses the norm of the whole gradient, not of the local shards
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    # Gather the model on rank 0, to save it. All ranks must call this; the others get an empty dict.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        print(f"state_dict {len(state)} tensors")
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
