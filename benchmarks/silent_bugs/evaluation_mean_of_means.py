"""The validation loss is a mean of the ranks' means of their batches' means, whatever their sizes.

Reported: https://github.com/NVIDIA/Megatron-LM/pull/7207
          https://github.com/Lightning-AI/pytorch-lightning/issues/12354
          https://github.com/tczhangzhi/pytorch-distributed (distributed.py, validate)
Wrong: the tokens of short documents and of small last batches weigh more; the number changes with ranks and batch size.
Kind: script
Expected: eval.mean-of-means
Right: sums of losses and of tokens over all ranks, divided once
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
PAD = -100


def make_documents(seed, size):
    """Documents of very different lengths, padded: tokens (size, 12) and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 10, (size, 1), generator=generator) + torch.arange(13)
    tokens = (tokens * torch.randint(1, 4, (size, 1), generator=generator)) % 10
    lengths = torch.randint(1, 13, (size, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(12) >= lengths, PAD)


@torch.no_grad()
def validate(model, inputs, targets):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses, tokens = [], []
    for own_inputs, own_targets in zip(
        inputs[rank::world_size].split(8), targets[rank::world_size].split(8), strict=True
    ):
        logits = model(own_inputs).flatten(0, 1)
        losses.append(F.cross_entropy(logits, own_targets.flatten(), ignore_index=PAD))
        tokens.append((own_targets != PAD).sum())
    losses, tokens = torch.stack(losses), torch.stack(tokens)
    if RIGHT:
        sums = torch.stack([(losses * tokens).sum(), tokens.sum().float()])
        dist.all_reduce(sums)
        return sums[0] / sums[1]
    mean = losses.mean()
    dist.all_reduce(mean)
    return mean / world_size  # <- the mistake


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = make_documents(1, 256)
    for step in range(16):
        rows = slice(step * 16 + rank, (step + 1) * 16, world_size)
        count = (targets[step * 16 : (step + 1) * 16] != PAD).sum()
        logits = model(inputs[rows]).flatten(0, 1)
        loss = F.cross_entropy(logits, targets[rows].flatten(), ignore_index=PAD, reduction="sum")
        optimizer.zero_grad()
        (loss * world_size / count).backward()
        optimizer.step()
        if step % 4 == 3:
            validation = validate(model, *make_documents(2, 45))
            if rank == 0:
                print(f"step {step} validation loss {validation:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
