"""Expert parallelism (mixture of experts): each rank has some experts, and tokens are sent to their experts and back.

Run: torchrun --standalone --nproc-per-node 2 expert.py

`python expert.py` trains the same network in one process. With --float64 both print the same losses.

Memory         some of the experts on every rank, with their gradients and optimizer state; a replica of all other
               layers
Communication  in each mixture, one all-to-all of tokens to their experts and one back, in forward and in backward; in
               each update, an all-reduce of the other layers' gradients and one of the squared gradient norm
Use when       the experts do not fit on one device, and the connection between devices is fast

What to change for your own training:
- Replace load() and build() by your data and your network, and Mixture by your layer with experts.
- There is no capacity limit: an expert gets all tokens that chose it. Ranks first exchange the numbers of rows.
- An expert's gradients are already sums over the tokens of all ranks: do not all-reduce them. DDP would, so with DDP
  list the experts in _ddp_params_and_buffers_to_ignore.
- All ranks have to call a mixture equally often, also ranks without samples and ranks whose experts have no tokens.
- For a checkpoint, each rank saves its experts, and rank 0 saves the other layers.
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
CLIP = 1.0  # maximum norm of the gradients


class AllToAll(torch.autograd.Function):
    """Send rows (N, D), send_counts[i] of them to rank i. Return rows (M, D), receive_counts[i] of them from rank i."""

    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts):
        ctx.send_counts, ctx.receive_counts = send_counts, receive_counts
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts)
        return received

    @staticmethod
    def backward(ctx, grad):  # sends gradients in the other direction
        return AllToAll.apply(grad, ctx.receive_counts, ctx.send_counts), None, None


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
        order = chosen.flatten().argsort(stable=True)  # sorts pairs (token, choice) by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        outputs = self.route(tokens[order // TOP_K], counts)
        outputs = outputs[order.argsort()].unflatten(0, (-1, TOP_K))  # restores the order of tokens
        return stream + (outputs * weights[:, :, None]).sum(1).view_as(stream)

    def route(self, rows, counts):
        """Return the outputs of the experts for rows sorted by expert, `counts` rows for each, in the same order."""
        world_size = EXPERTS // len(self.experts)
        if world_size == 1:
            return self.run(rows.split(counts.tolist()))
        received_counts = torch.empty_like(counts)  # rows for each local expert, from each rank
        dist.all_to_all_single(received_counts, counts)
        send_counts, receive_counts = (
            numbers.view(world_size, -1).sum(1).tolist() for numbers in (counts, received_counts)
        )
        expert = (
            torch.arange(len(self.experts), device=rows.device).repeat(world_size).repeat_interleave(received_counts)
        )
        order = expert.argsort(stable=True)  # received rows are sorted by sending rank
        local_rows = AllToAll.apply(rows, send_counts, receive_counts)[order].split(
            expert.bincount(minlength=len(self.experts)).tolist()
        )
        return AllToAll.apply(self.run(local_rows)[order.argsort()], receive_counts, send_counts)

    def run(self, rows_by_expert):
        # Experts without rows run, too: they get zero gradients, and their rank takes part in the backward all-to-all.
        return torch.cat([expert(rows) for expert, rows in zip(self.experts, rows_by_expert, strict=True)])


def build():
    """Return a network whose tokens are the rows of an image, (N, 1, 8, 8) -> (N, 10); the same in every process."""
    torch.manual_seed(SEED)
    ends = nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10)
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, WIDTH), Mixture(), Mixture(), nn.Flatten(), *ends)


@torch.no_grad()
def reduce_and_clip(shared, experts, world_size):
    """Sum the gradients of shared parameters over ranks, then clip all gradients to the norm CLIP."""
    if world_size > 1:
        flat = torch.cat([parameter.grad.flatten() for parameter in shared])
        dist.all_reduce(flat)
        for parameter, part in zip(shared, flat.split([parameter.numel() for parameter in shared]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
    squares = sum(parameter.grad.square().sum() for parameter in experts)
    if world_size > 1:
        dist.all_reduce(squares)  # sums over the experts of all ranks; shared parameters count once
    squares += sum(parameter.grad.square().sum() for parameter in shared)
    for parameter in (*shared, *experts):
        parameter.grad.mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1))  # 1e-6 as in torch


@torch.no_grad()
def evaluate(model, data, rank, world_size, device):
    """Return the fraction of correctly classified images. All ranks must call it."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in zip(*(tensor.split(BATCH) for tensor in data.tensors), strict=True):
        images, labels = (tensor.tensor_split(world_size)[rank].to(device) for tensor in (images, labels))
        correct += (model(images).argmax(1) == labels).sum()
    if world_size > 1:
        dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def connect(rank, world_size):
    """Return the device of this rank, after creating the process group if there are several ranks."""
    if EXPERTS % world_size:
        if rank == 0:
            sys.stderr.write(f"{Path(__file__).name}: {EXPERTS} experts cannot be divided over {world_size} ranks\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
        )
    return device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = connect(rank, world_size)
    model, num_local = build(), EXPERTS // world_size
    for mixture in model[2:4]:
        mixture.experts = mixture.experts[rank * num_local : (rank + 1) * num_local]
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
            images, labels = (tensor.to(device) for tensor in train_data[batch.tensor_split(world_size)[rank]])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / len(
                batch
            )  # len(batch): samples of all ranks
            loss.backward()
            reduce_and_clip(shared, experts, world_size)
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        if world_size > 1:
            dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(model, eval_data, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    if world_size > 1:
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
