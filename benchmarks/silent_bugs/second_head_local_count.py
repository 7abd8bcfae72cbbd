"""The main loss is divided by the tokens of all ranks, that of the second head by the tokens of its own rank.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 3: multi-token prediction)
          https://github.com/NVIDIA/Megatron-LM/pull/7498
Wrong: where ranks hold unequal numbers of tokens, those of the second head weigh unequally; the main head is right.
Kind: script
Expected: gradient.ragged
Right: both are divided by counts over all ranks
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
LENGTH = 20


class TwoTokensAhead(nn.Module):
    """One head predicts the next token, the other one the token after it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(14, 24), nn.GRU(24, 32, batch_first=True)
        self.next, self.after_next = nn.Linear(32, 14), nn.Linear(32, 14)

    def forward(self, tokens):
        hidden, _ = self.body(self.embedding(tokens))
        return self.next(hidden), self.after_next(hidden)


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    strides = torch.randint(1, 5, (8, 1), generator=generator)
    tokens = (torch.randint(0, 14, (8, 1), generator=generator) + strides * torch.arange(LENGTH + 2)) % 14
    lengths, _ = torch.randint(2, LENGTH, (8, 1), generator=generator).sort(0)
    return tokens, (torch.arange(LENGTH) < lengths).float()


def masked_sum(logits, targets, mask):
    return (F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * mask).sum()


def total(count):
    count = count.clone()
    dist.all_reduce(count)
    return count


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTokensAhead())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(30):
        tokens, mask = (part.chunk(world_size)[rank] for part in make_batch(step))
        main_logits, second_logits = model(tokens[:, :LENGTH])
        main_loss = masked_sum(main_logits, tokens[:, 1 : LENGTH + 1], mask) * world_size / total(mask.sum())
        second_mask = mask.roll(-1, 1) * mask
        second_loss = masked_sum(second_logits, tokens[:, 2:], second_mask)
        if RIGHT:
            second_loss = second_loss * world_size / total(second_mask.sum())
        else:
            second_loss = second_loss / second_mask.sum().clamp(min=1)  # <- the mistake
        optimizer.zero_grad()
        (main_loss + 0.5 * second_loss).backward()
        optimizer.step()
        logged = torch.stack([main_loss.detach(), second_loss.detach()]) / world_size
        dist.all_reduce(logged)
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {logged[0]:.6f} second head {logged[1]:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
