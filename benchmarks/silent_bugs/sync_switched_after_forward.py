"""require_backward_grad_sync is set between forward and backward, and DDP has already decided in forward.

Reported: https://github.com/karpathy/build-nanogpt/pull/30
          https://github.com/Haian-Jin/LVSM/pull/22
Wrong: the last micro-batch is not synchronised; every rank steps with gradients of its own.
Kind: script
Expected: gradient.weights
Right: set it before forward
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
BATCH, LENGTH, ACCUMULATE = 16, 32, 4

text = "the quick brown fox jumps over the lazy dog while seven wizards box the jolly quivering pixies " * 12
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


def get_batch(number, rank, world_size):
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH // ACCUMULATE,), generator=generator)[rank::world_size]
    rows = starts[:, None] + torch.arange(LENGTH)
    return data[rows], data[rows + 1]


class Bigram(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 48), nn.Linear(96, size)

    def forward(self, tokens, targets):
        now = self.embedding(tokens)
        before = F.pad(now, (0, 0, 1, 0))[:, :-1]
        return F.cross_entropy(self.head(torch.cat([now, before], -1)).flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    model = DistributedDataParallel(Bigram(len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        loss_accum = torch.zeros(())
        for micro_step in range(ACCUMULATE):
            x, y = get_batch(step * ACCUMULATE + micro_step, rank, world_size)
            if RIGHT:
                model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss = model(x, y) / ACCUMULATE
            loss_accum += loss.detach()
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1  # <- the mistake
            loss.backward()
        dist.all_reduce(loss_accum, op=dist.ReduceOp.AVG)
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {loss_accum:.6f}")
    with torch.no_grad():
        print(f"rank {rank} loss on the whole text {model.module(data[None, :-1], data[None, 1:]):.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
