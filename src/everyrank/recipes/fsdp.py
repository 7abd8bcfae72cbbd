"""Fully sharded data parallel (FSDP2): each rank keeps a shard of parameters, gradients and optimizer state.

Run: torchrun --standalone --nproc-per-node 2 fsdp.py

Memory         a shard of everything on every rank; full parameters only for the blocks that are being computed
Communication  per block: parameters by all-gather, in forward and again in backward; gradients by reduce-scatter
Use when       model, gradients and optimizer state do not fit on one device

What to change for your own training:
- Call fully_shard on the repeated blocks of your network (a transformer's layers). Ranks gather one block at a time.
- Create the optimizer after sharding. fully_shard replaces the parameters, so an earlier optimizer trains nothing.
- Call the model equally often on every rank, also in evaluation: each forward pass waits for all ranks.
- If two modules share a weight, shard them together: fully_shard([first, second]).
- If the model does not fit in CPU memory, load its shards with torch.distributed.checkpoint after to_empty().
- Compute buffers (rotary tables, masks) after to_empty(), because the meta device leaves them empty.
"""

import argparse
import os
import time
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, count_correct, load, print_losses
from transformer import build

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
CLIP = 1.0  # maximum norm of the gradients


def build_sharded(rank, world_size, device, dtype, bf16):
    """Return the network, sharded over the ranks. Only rank 0 has all weights at once, in CPU memory."""
    with torch.device("meta"):  # shapes without memory
        model = build().to(dtype)

    # Blocks are gathered and computed in bf16, which halves the communication. Gradients are reduced in float32: a sum
    # over many ranks loses digits in bf16. The optimizer updates float32 shards.
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))
    # This call shards the first and last layers. The output has full precision, for the loss.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision, output_dtype=dtype))

    # Prefetch: each block gathers the parameters of the next one before it launches its own kernels, so that both
    # overlap even if the CPU is slow.
    for block, next_block in pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])

    model.to_empty(device=device)  # uninitialized memory for the shards
    # Rank 0 initializes all weights and sends shards, so that the weights do not depend on the number of ranks.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, build().to(dtype).state_dict() if rank == 0 else {}, options=options)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; parameters and updates stay in float32")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build_sharded(rank, world_size, device, dtype, args.bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # FSDP divides the sum over ranks by world_size
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
