"""The loss is divided by the tokens of all ranks already, and DDP then divides by the number of ranks once more.

Reported: https://github.com/pytorch/torchtitan/issues/2318
          https://github.com/ByteDance-Seed/VeOmni/pull/338
Wrong: gradients and their norm are world_size times too small; clipping never sets in.
Kind: script
Expected: gradient.scale
Right: times world_size, so that the average of DDP is a sum
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
IGNORE = -100


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, 20, (16, 1), generator=generator) + 3 * torch.arange(17)) % 20
    dropped = torch.rand(16, 16, generator=generator) < 0.3
    return tokens[:, :-1], tokens[:, 1:].masked_fill(dropped, IGNORE)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 20))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(20):
        tokens, targets = (part[rank::world_size] for part in make_batch(step))
        num_tokens = (targets != IGNORE).sum()
        dist.all_reduce(num_tokens)
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum") / num_tokens
        optimizer.zero_grad()
        if RIGHT:
            (loss * world_size).backward()
        else:
            loss.backward()  # <- the mistake
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 3:
            print(f"step {step} loss {total:.6f} gradient norm {norm:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
