"""A small transformer that reads the rows of an image as tokens: the network of tensor, fsdp, hsdp and fsdp_tensor.

Replace Block and build() by your own network. Its blocks are what these scripts split or shard one by one.
"""

import torch
import torch.nn.functional as F
from torch import nn

from digits import SEED

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """Attention between the rows of an image, then two layers on each row: (N, 8, WIDTH) -> (N, 8, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream):
        normed = self.attention_norm(stream)
        # -1 is the number of heads on this rank: all of them, unless tensor parallelism splits the layers.
        heads = [layer(normed).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads))
        stream = stream + self.output(mixed.transpose(1, 2).flatten(-2))
        return stream + self.down(F.relu(self.up(self.feed_norm(stream))))


class Transformer(nn.Module):
    """Scores of the ten digits: (N, 1, 8, 8) -> (N, 10)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Flatten(), nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10))

    def forward(self, images):
        stream = self.embedding(images.flatten(1, 2))
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)


def build():
    """The transformer, with the same weights in every process."""
    torch.manual_seed(SEED)
    return Transformer()
