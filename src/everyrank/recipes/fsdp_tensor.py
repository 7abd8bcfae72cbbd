"""FSDP2 with tensor parallelism: two axes of a device mesh, one for each.

Run: torchrun --standalone --nproc-per-node 4 fsdp_tensor.py

Memory         a part of each large layer on every rank: split over the tensor axis, then sharded over the other axis
Communication  on the tensor axis, all-reduces of activations in every block, in forward and backward; on the shard
               axis, all-gathers of parameters and reduce-scatters of gradients, as in FSDP
Use when       FSDP on all ranks would need too large a batch, or a single layer does not fit on a device

What to change for your own training:
- tensor.py explains PLAN for the same network. Split the layers first, then call fully_shard.
- The batch is divided over the shard axis only: the ranks of a tensor group read the same samples.
- Keep a tensor group within one host, because its ranks communicate in every layer. FSDP can work across hosts.
- For mixed precision, the meta device and prefetching, see fsdp.py.
"""

import argparse
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, count_correct, load, print_losses
from transformer import HEADS, build

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
TENSOR = 2  # ranks that share each layer; it divides the number of ranks and of heads
CLIP = 1.0  # maximum norm of the gradients
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("output", "down")}


@torch.no_grad()
def clip(gradients):
    """Clip gradients to the norm CLIP. torch's clip_grad_norm_ raises for gradients on several meshes."""
    squares = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
    for gradient in gradients:
        axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        pieces = math.prod(size for size, placement in axes if not placement.is_replicate())
        # With fewer pieces than ranks, several ranks have the same piece, which must count once.
        squares += gradient.to_local().square().sum() * pieces / dist.get_world_size()
    dist.all_reduce(squares)
    for gradient in gradients:
        gradient.to_local().mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size or world_size % TENSOR or HEADS % TENSOR:
        if rank == 0:
            message = f"TENSOR={TENSOR} has to divide the {world_size} ranks and the {HEADS} heads"
            sys.stderr.write(f"{Path(__file__).name}: {message}\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    mesh = init_device_mesh(device.type, (world_size // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    for axis in mesh.mesh_dim_names:  # groups of a mesh do not inherit the timeout
        mesh.get_group(axis).set_timeout(timedelta(minutes=5))
    shards, model = mesh["shard"], build().to(device, dtype)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)  # shards the first and last layers
    train_data, eval_data = load(dtype)
    # Ranks of a tensor group have the same coordinate on the shard axis, and so read the same samples.
    shard, num_shards = shards.get_local_rank(), shards.size()
    sampler = DistributedBatchSampler(len(train_data), BATCH, shard, num_shards)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4
    )  # created after both calls, which replace the parameters

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            (loss * num_shards).backward()  # FSDP divides the sum over shards by num_shards
            clip([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        # Sum over the shard axis only, because all ranks of a tensor group have the loss of the same samples.
        dist.all_reduce(losses, group=shards.get_group())
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, shard, num_shards)
    dist.all_reduce(correct, group=shards.get_group())
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
