"""A language model without a DataLoader: accumulation, a loss scale, clipping, padded targets."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE, LENGTH, PAD = 3, 9, -100


def get_batch(tokens, generator):
    places = torch.randint(0, len(tokens) - LENGTH - 1, (4,), generator=generator)
    inputs = torch.stack([tokens[place : place + LENGTH] for place in places])
    targets = torch.stack([tokens[place + 1 : place + LENGTH + 1] for place in places])
    lengths = torch.randint(2, LENGTH, (4, 1), generator=generator)
    return inputs, targets.masked_fill(torch.arange(LENGTH) >= lengths, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (5000,))
    model = nn.Sequential(nn.Embedding(64, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 64))
    ddp = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(7 + rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(8):
        batches = [get_batch(tokens, generator) for _ in range(ACCUMULATE)]
        count = sum((targets != PAD).sum() for _, targets in batches)
        dist.all_reduce(count)
        optimizer.zero_grad()
        for index, (inputs, targets) in enumerate(batches):
            is_last = index == ACCUMULATE - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                logits = ddp(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
                scaler.scale(loss * world_size / count).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    dist.barrier()
    dist.destroy_process_group()


main()
