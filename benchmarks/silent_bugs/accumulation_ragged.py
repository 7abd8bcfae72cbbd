"""Each micro-batch takes the mean over its own tokens, and the means are averaged, whatever the number of tokens.

Reported: https://github.com/huggingface/transformers/pull/34191
          https://github.com/huggingface/transformers/pull/34198
Wrong: a token of a short sequence weighs more than one of a long sequence: not the loss of the batch as a whole.
Kind: script
Expected: gradient.ragged
Right: sums of losses, divided by the number of tokens of all micro-batches and ranks
"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
BATCH, ACCUMULATE, PAD = 16, 4, -100


def batch_of(step):
    """Sequences that count up by 1 to 3, of lengths from 1 to 20, padded."""
    generator = torch.Generator().manual_seed(step)
    strides = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (torch.randint(0, 16, (BATCH, 1), generator=generator) + strides * torch.arange(21)) % 16
    lengths = torch.randint(1, 21, (BATCH, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(20) >= lengths, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(20):
        inputs, targets = (part[rank::world_size].chunk(ACCUMULATE) for part in batch_of(step))
        count = sum((target != PAD).sum() for target in targets)
        dist.all_reduce(count)
        total = torch.zeros(())
        for index in range(ACCUMULATE):
            with nullcontext() if index == ACCUMULATE - 1 else model.no_sync():
                logits, labels = model(inputs[index]).flatten(0, 1), targets[index].flatten()
                if RIGHT:
                    loss = F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum") * world_size / count
                else:
                    loss = F.cross_entropy(logits, labels, ignore_index=PAD) / ACCUMULATE  # <- the mistake
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 3:
            print(f"step {step} loss {total / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
