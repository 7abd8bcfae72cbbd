"""A contrastive loss (SimCLR's NT-Xent) over the batch of all ranks: each image against every other one, also theirs.

Run: torchrun --standalone --nproc-per-node 2 contrastive.py

`python contrastive.py` trains the same network in one process: with --float64 on both the losses are the same.

Holds     the whole model on every rank; the embeddings of the whole batch, too
Travels   the embeddings, by all-gather; their gradients, by all-reduce; those of the parameters, as in DDP
Use when  the loss compares samples with each other, and more negatives than one rank has are wanted

What to change for your own training:
- load(), two_views() and build() are your data, your augmentation and your network.
- BATCH is the batch of all ranks. A loss over what one rank has is another loss, with fewer negatives.
- Gather rows of one shape, one for each sample, in the order of the batch: labels and masks are counted in it.
- Gradients have to come back through the gather: dist.all_gather gives none, and every rank's must be added up.
- Two small passes of half a batch (accumulation) are another loss, too; recompute activations to save memory.
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
    """Each image twice, moved by up to one pixel and with noise: (N, 1, 8, 8) -> (N, 2, 1, 8, 8).

    Of all images at once, so that what is drawn depends on the epoch and the image alone, not on the ranks.
    """
    generator = torch.Generator().manual_seed(SEED + epoch)
    moves = torch.randint(-1, 2, (2, 2), generator=generator).tolist()
    views = torch.stack([torch.roll(images, move, (2, 3)) for move in moves], dim=1)
    return views + 0.1 * torch.randn(views.shape, generator=generator, dtype=images.dtype).to(images.device)


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 16), with the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 16))


class Gather(torch.autograd.Function):
    """The rows of this rank -> the rows of all ranks, in order; backward sums the gradients of all ranks for a row."""

    @staticmethod
    def forward(ctx, local_features, sizes, rank):
        ctx.sizes, ctx.rank = sizes, rank
        padded = local_features.new_zeros(
            max(sizes), *local_features.shape[1:]
        )  # slices may differ by one row, and all_gather's may not
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
    """Sum of the losses: each view (b, 2, d) has to find the other view of its image among all views (B, 2, d)."""
    index = first + torch.arange(len(local_features), device=local_features.device)
    total = local_features.new_zeros(())
    for view in (0, 1):
        logits = local_features[:, view] @ torch.cat([all_features[:, 1 - view], all_features[:, view]]).T / TEMPERATURE
        logits = logits.scatter(1, (len(all_features) + index)[:, None], float("-inf"))  # not itself
        total = total + F.cross_entropy(logits, index, reduction="sum")
    return total


@torch.no_grad()
def evaluate(model, train_data, eval_data, device):
    """The fraction of evaluation images whose nearest training image is the same digit; the same on every rank."""
    keys, queries = (F.normalize(model(data.tensors[0].to(device)), dim=1) for data in (train_data, eval_data))
    nearest = (queries @ keys.T).argmax(1).cpu()
    return (train_data.tensors[1][nearest] == eval_data.tensors[1]).double().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    model = ddp = build().to(device, dtype)
    if world_size > 1:
        if cuda:
            torch.cuda.set_device(device)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
        )
        ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    train_data, eval_data = load(dtype)
    images = train_data.tensors[0].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # DistributedSampler repeats samples, and a sample would be its own negative. Here each rank knows all parts.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        views = two_views(images, epoch)
        losses = []
        for batch in batches:
            slices = batch.tensor_split(world_size)
            sizes = [len(part) for part in slices]
            optimizer.zero_grad()
            local_features = F.normalize(ddp(views[slices[rank]].flatten(0, 1)), dim=1).unflatten(0, (-1, 2))
            all_features = Gather.apply(local_features, sizes, rank) if world_size > 1 else local_features
            loss = contrast(local_features, all_features, sum(sizes[:rank])) / (
                2 * len(batch)
            )  # two terms for each image
            (loss * world_size).backward()  # the sum over ranks: DDP divides it by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if world_size > 1:
            dist.all_reduce(losses)  # once per epoch: in the loop, every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(model, train_data, eval_data, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    if world_size > 1:
        del ddp  # before its process group is destroyed
        time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
