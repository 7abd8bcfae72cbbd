"""Mixture of experts: each rank holds some of the experts, and tokens travel to those that they chose, and back.

Run: torchrun --standalone --nproc-per-node 2 expert.py

`python expert.py` trains the same network whole, in one process: with --float64 on both the losses are the same.

Holds     its experts, their gradients and optimizer state; all else whole
Travels   per mixture an all-to-all of each token to its experts and one back, in forward and in backward; per update
          one all-reduce of the gradients of what is no expert's, one of the sum of squares
Use when  the experts do not fit on one device, and devices are connected fast

What to change for your own training:
- load() and build() are your data and your network; a layer of yours with experts takes the place of Mixture.
- No capacity: every token reaches its experts, however many others chose them. The numbers of rows travel ahead.
- The gradients of experts are sums over the tokens of all ranks already. Neither add them up over ranks nor divide
  them by more than all others; DDP would do both (list them in _ddp_params_and_buffers_to_ignore).
- Ranks go through a mixture equally often, also those that have no sample and those whose experts nobody chose.
- Checkpoints: each rank saves its own experts; rank 0 saves the rest.
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
from torch import nn

from digits import load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
SEED = 0
WIDTH = 32
EXPERTS, TOP_K = 4, 2  # the number of ranks divides the experts
CLIP = 1.0  # the largest norm that the gradients may have


class AllToAll(torch.autograd.Function):
    """Rows (N, D) to the ranks in turn, as many as `to` says -> (M, D): from each as many as `of` says."""

    @staticmethod
    def forward(ctx, rows, to, of):
        ctx.to, ctx.of = to, of
        received = rows.new_empty(sum(of), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), of, to)
        return received

    @staticmethod
    def backward(ctx, grad):  # the way back
        return AllToAll.apply(grad, ctx.of, ctx.to), None, None


class Mixture(nn.Module):
    """Adds to each token the weighted outputs of its TOP_K experts: (N, 8, WIDTH) -> (N, 8, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        layers = [(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(nn.Sequential(*expert) for expert in layers)

    def forward(self, stream):
        tokens = self.norm(stream).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(1).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)  # pairs of token and choice: by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        outputs = self.route(tokens[order // TOP_K], counts)
        outputs = outputs[order.argsort()].unflatten(0, (-1, TOP_K))  # by token again
        return stream + (outputs * weights[:, :, None]).sum(1).view_as(stream)

    def route(self, rows, counts):
        """Outputs of the experts for rows sorted by expert, `counts` rows for each, in the same order."""
        world_size = EXPERTS // len(self.experts)
        if world_size == 1:
            return self.run(rows.split(counts.tolist()))
        received_counts = torch.empty_like(counts)  # numbers of rows for the experts of this rank, by sending rank
        dist.all_to_all_single(received_counts, counts)
        to, of = (numbers.view(world_size, -1).sum(1).tolist() for numbers in (counts, received_counts))
        expert = (
            torch.arange(len(self.experts), device=rows.device).repeat(world_size).repeat_interleave(received_counts)
        )
        order = expert.argsort(stable=True)  # received rows are sorted by sending rank
        local_rows = AllToAll.apply(rows, to, of)[order].split(expert.bincount(minlength=len(self.experts)).tolist())
        return AllToAll.apply(self.run(local_rows)[order.argsort()], of, to)

    def run(self, parts):
        # An expert without rows runs, too: its gradients are zero, and every rank takes part in the way back.
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def build():
    """A network whose tokens are the rows of an image, (N, 1, 8, 8) -> (N, 10); the same in every process."""
    torch.manual_seed(SEED)
    ends = nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10)
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, WIDTH), Mixture(), Mixture(), nn.Flatten(), *ends)


@torch.no_grad()
def reduce_and_clip(shared, experts, world_size):
    """Add up over ranks the gradients of what all of them hold; then scale all until their norm is at most CLIP."""
    if world_size > 1:
        flat = torch.cat([parameter.grad.flatten() for parameter in shared])
        dist.all_reduce(flat)
        for parameter, part in zip(shared, flat.split([parameter.numel() for parameter in shared]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
    squares = sum(parameter.grad.square().sum() for parameter in experts)
    if world_size > 1:
        dist.all_reduce(squares)  # other ranks have other experts; all else counts once
    squares += sum(parameter.grad.square().sum() for parameter in shared)
    for parameter in (*shared, *experts):
        parameter.grad.mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


@torch.no_grad()
def evaluate(model, data, rank, world_size, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in zip(*(tensor.split(BATCH) for tensor in data.tensors), strict=True):
        images, labels = (part.tensor_split(world_size)[rank].to(device) for part in (images, labels))
        correct += (model(images).argmax(1) == labels).sum()
    if world_size > 1:
        dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def connect(rank, world_size):
    """This rank's device, and the process group, where there are several ranks."""
    if EXPERTS % world_size:
        if rank == 0:
            sys.stderr.write(
                f"{Path(__file__).name}: {EXPERTS} experts cannot be shared by {world_size} ranks evenly\n"
            )
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
        )
    return device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = connect(rank, world_size)
    model, num_own = build(), EXPERTS // world_size
    for mixture in model[2:4]:
        mixture.experts = mixture.experts[rank * num_own : (rank + 1) * num_own]
    model = model.to(device, dtype)
    experts = [parameter for mixture in model[2:4] for parameter in mixture.experts.parameters()]
    shared = [parameter for name, parameter in model.named_parameters() if ".experts." not in name]
    train_data, eval_data = load(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_data), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.split(BATCH)
        losses = []
        for batch in batches:
            images, labels = (part.to(device) for part in train_data[batch.tensor_split(world_size)[rank]])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / len(batch)  # of the batch of all ranks
            loss.backward()
            reduce_and_clip(shared, experts, world_size)
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if world_size > 1:
            dist.all_reduce(losses)  # once per epoch: in the loop, every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(model, eval_data, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    if world_size > 1:
        time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
