"""Tensor parallelism: each rank has a part of every large layer, and all ranks compute the same batch together.

Run: torchrun --standalone --nproc-per-node 2 tensor.py

`python tensor.py` trains the same network in one process; with --float64 both print the same losses.

Memory         a part of each large layer, its gradient and its optimizer state; small layers in full
Communication  per pair of layers, one all-reduce of activations in forward and one in backward; no gradients
Use when       single layers or their activations are too large for a device, and connections are fast (one host)

What to change for your own training:
- PLAN names the layers of your network in pairs. Split the first by columns and the second by rows: ranks communicate
  only after the second, by an all-reduce. All other layers are in full on every rank.
- Compute the number of heads from the local width, as Block in transformer.py does. With a constant in forward(), the
  losses are wrong, without an error.
- Do not use one fused layer for query, key and value: split by columns, a rank gets parts of different heads.
- parallelize_module unties tied weights without a warning. Tie them again afterwards.
- All ranks read the same samples in the same order. Dropout outside the pairs needs the same seed on all ranks.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, RandomSampler

from digits import count_correct, load, print_losses
from transformer import HEADS, build

EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0
CLIP = 1.0  # maximum norm of the gradients
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("output", "down")}


@torch.no_grad()
def clip(gradients, world_size):
    """Scale the gradients until their norm, as one vector over all ranks, is at most CLIP."""
    # torch's clip_grad_norm_ raises if only some gradients are split (DTensor).
    is_split = [isinstance(gradient, DTensor) and gradient.placements[0].is_shard() for gradient in gradients]
    local_gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    squares = 0
    for gradient, split in zip(local_gradients, is_split, strict=True):
        # Every rank has the gradients that are not split, but they must count once.
        squares = squares + gradient.square().sum() / (1 if split else world_size)
    if world_size > 1:
        dist.all_reduce(squares)
    for gradient in local_gradients:
        gradient.mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % world_size:
        if rank == 0:
            sys.stderr.write(f"{Path(__file__).name}: {HEADS} heads cannot be divided over {world_size} ranks\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    model = build().to(device, dtype)
    if world_size > 1:
        if cuda:
            torch.cuda.set_device(device)
        # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
        )
        mesh = init_device_mesh(device.type, (world_size,))
        for block in model.blocks:
            parallelize_module(block, mesh, PLAN)
    train_data, eval_data = load(dtype)
    # All ranks read the same samples, in the order that one seed gives, so there is no DistributedSampler.
    generator = torch.Generator()
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=cuda)
    # The split has replaced the parameters, so the optimizer comes after it. foreach raises if only some are split.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, foreach=False)

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a different order in each epoch
        losses = []
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            clip([parameter.grad for parameter in model.parameters()], world_size)
            optimizer.step()
            losses.append(loss.detach())

        # Every rank has the loss of the whole batch, so there is no sum over ranks.
        if rank == 0:
            print_losses(epoch, torch.stack(losses), every_update=args.float64)

    correct = count_correct(model, eval_data, device)  # every rank calls it, and has all images
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    if world_size > 1:
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
