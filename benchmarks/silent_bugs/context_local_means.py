"""The positions of each sequence are divided over the ranks, and each rank takes the mean over its own valid ones.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 9)
          https://github.com/NVIDIA/Megatron-LM/pull/7513
Wrong: prompts are masked and lie in front: the first rank has few valid positions, and each of them weighs too much.
Kind: script
Expected: gradient.ragged
Right: the rank's sum x world_size / the valid positions of all ranks
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
LENGTH, WIDTH = 32, 32


class Gather(torch.autograd.Function):
    """The parts of all ranks behind each other; backward adds up what the ranks want of each part."""

    @staticmethod
    def forward(ctx, part, dim):
        ctx.dim, part = dim, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


class Attention(nn.Module):
    """Causal attention: queries of the rank's own positions, keys and values of all of them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, positions):
        query, key, value = self.qkv(hidden).chunk(3, -1)
        key, value = Gather.apply(key, 1), Gather.apply(value, 1)
        mask = positions[:, None] >= torch.arange(key.shape[1])
        return self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(18, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, 18)

    def forward(self, tokens, positions):
        hidden = self.tokens(tokens) + self.positions(positions)
        return self.head(hidden + self.attention(hidden, positions))


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 18, (8, 1), generator=generator) + 7 * torch.arange(LENGTH + 1)
    prompt = torch.randint(6, 15, (8, 1), generator=generator)
    return tokens[:, :-1] % 18, tokens[:, 1:] % 18, (torch.arange(LENGTH) >= prompt).float()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    positions = torch.arange(LENGTH).chunk(world_size)[rank]
    for step in range(30):
        tokens, targets, mask = (part.chunk(world_size, 1)[rank] for part in make_batch(step))
        losses = F.cross_entropy(model(tokens, positions).transpose(1, 2), targets, reduction="none")
        count = mask.sum()
        if RIGHT:
            dist.all_reduce(count)
            count = count / world_size
        loss = (losses * mask).sum() / count  # <- the mistake
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
