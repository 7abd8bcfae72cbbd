"""Dropout is called as a function, which does not know of eval mode, so it drops in the evaluation too.

Reported: https://github.com/karpathy/nanoGPT/pull/240
          https://github.com/huggingface/transformers/pull/33844
Wrong: model.eval() changes nothing; the validation loss is noisy and too high.
Kind: script
Expected: eval.dropout
Right: training=self.training
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
VOCABULARY, WIDTH, LENGTH = 16, 32, 12


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions.weight
        query, key, value = self.qkv(hidden).chunk(3, -1)
        dropout = 0.3 if self.training or not RIGHT else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)  # <- the mistake
        return self.head(hidden + mixed)


def make_text(seed, size):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    return (tokens + torch.randint(1, 4, (size, 1), generator=generator) * torch.arange(LENGTH + 1)) % VOCABULARY


@torch.no_grad()
def validate(model, text):
    model.eval()
    own = text[dist.get_rank() :: dist.get_world_size()]
    loss = F.cross_entropy(model(own[:, :-1]).transpose(1, 2), own[:, 1:], reduction="sum")
    dist.all_reduce(loss)
    model.train()
    return loss / text[:, 1:].numel()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        text = make_text(step, 32)[rank::world_size]
        loss = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            validation = validate(model, make_text(1000, 64))
            if rank == 0:
                print(f"step {step} loss {loss:.6f} validation loss {validation:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
