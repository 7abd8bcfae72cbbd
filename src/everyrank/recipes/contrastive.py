"""Contrastive loss (SimCLR's NT-Xent) over the batch of all ranks: each image is compared with those of all ranks.

Run: torchrun --standalone --nproc-per-node 2 contrastive.py

`python contrastive.py` trains the same network in one process. With --float64 both print the same losses.

Memory         the whole model and the embeddings of the whole batch, on every rank
Communication  the embeddings, by all-gather; their gradients, by all-reduce; the gradients of the parameters, as in DDP
Use when       the loss compares samples with each other, and needs more negatives than the samples of one rank

What to change for your own training:
- Replace load(), two_views() and build() by your data, your augmentation and your network.
- BATCH is the batch of all ranks. A loss over the samples of one rank has fewer negatives, so it is different.
- Gather one row for each sample, of the same shape, in the order of the batch. Labels and masks are indices into it.
- Gradients have to pass through the gather. dist.all_gather has no backward; Gather sums the gradients of all ranks.
- Do not use gradient accumulation, which changes the loss, too. Use activation checkpointing to save memory.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits import load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
SEED = 0
TEMPERATURE = 0.5


def two_views(images, epoch):
    """Return two views of each image, moved by up to one pixel and with noise: (N, 1, 8, 8) -> (N, 2, 1, 8, 8).

    Random numbers are drawn for all images at once, so that they do not depend on the rank.
    """
    generator = torch.Generator().manual_seed(SEED + epoch)
    moves = torch.randint(-1, 2, (2, 2), generator=generator).tolist()
    views = torch.stack([torch.roll(images, move, (2, 3)) for move in moves], dim=1)
    return views + 0.1 * torch.randn(views.shape, generator=generator, dtype=images.dtype).to(images.device)


def build():
    """Return a small convolutional network, (N, 1, 8, 8) -> (N, 16), with the same weights in every process."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        # Group norm has no statistics over samples, so that ranks have nothing to synchronize.
        return nn.Sequential(convolution, nn.GroupNorm(4, out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 16))


class Gather(torch.autograd.Function):
    """All-gather with a backward pass: local rows -> rows of all ranks, in order. Backward sums over ranks."""

    @staticmethod
    def forward(ctx, local_features, sizes, rank):
        ctx.sizes, ctx.rank = sizes, rank
        # all_gather needs tensors of one shape, and ranks may differ by one row, so the rows are padded.
        padded = local_features.new_zeros(max(sizes), *local_features.shape[1:])
        padded[: len(local_features)] = local_features
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[ctx.rank], None, None


def contrast(local_features, all_features, first):
    """Return the summed loss: each view (b, 2, d) has to find the other view of its image among all views (B, 2, d)."""
    index = first + torch.arange(len(local_features), device=local_features.device)
    total = local_features.new_zeros(())
    for view in (0, 1):
        logits = local_features[:, view] @ torch.cat([all_features[:, 1 - view], all_features[:, view]]).T / TEMPERATURE
        logits = logits.scatter(
            1, (len(all_features) + index)[:, None], float("-inf")
        )  # a view is not compared with itself
        total = total + F.cross_entropy(logits, index, reduction="sum")
    return total


@torch.no_grad()
def evaluate(model, train_data, eval_data, device):
    """Return the fraction of evaluation images whose nearest training image is the same digit."""
    keys, queries = (F.normalize(model(data.tensors[0].to(device)), dim=1) for data in (train_data, eval_data))
    nearest = (queries @ keys.T).argmax(1).cpu()
    return (train_data.tensors[1][nearest] == eval_data.tensors[1]).double().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    model = ddp = build().to(device, dtype)
    if world_size > 1:
        if cuda:
            torch.cuda.set_device(device)
        # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
        )
        ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    train_data, eval_data = load(dtype)
    images = train_data.tensors[0].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # DistributedSampler repeats samples, and a repeated sample would be its own negative.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        views = two_views(images, epoch)
        losses = []
        for batch in batches:
            slices = batch.tensor_split(world_size)
            sizes = [len(indices) for indices in slices]
            optimizer.zero_grad()
            local_features = F.normalize(ddp(views[slices[rank]].flatten(0, 1)), dim=1).unflatten(0, (-1, 2))
            all_features = Gather.apply(local_features, sizes, rank) if world_size > 1 else local_features
            num_terms = 2 * len(batch)  # one term for each view
            loss = contrast(local_features, all_features, sum(sizes[:rank])) / num_terms
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if world_size > 1:
            dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(model, train_data, eval_data, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    if world_size > 1:
        del ddp  # DDP has to be freed before its process group is destroyed
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
