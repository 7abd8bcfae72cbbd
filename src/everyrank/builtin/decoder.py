"""A decoder transformer with RMSNorm, rotary positions and SwiGLU layers, optionally as a mixture of experts.

Positions are an input, because a rank that holds only part of a sequence cannot count them itself.

Source: Vaswani et al. 2017; Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021 (rotary positions); Shazeer 2020
(SwiGLU); Shazeer et al. 2017 and Fedus et al. 2022 (experts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DECODER_EXPERTS", "DECODER_PLAN", "Decoder", "DecoderShape", "decoder_plan"]

DECODER_PLAN = {
    "embedding": "vocabulary",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.feed_norm": "sequence",
    "blocks.*.feed": "gather",
    "blocks.*.feed.gate": "colwise",
    "blocks.*.feed.up": "colwise",
    "blocks.*.feed.down": "rowwise",
    "norm": "sequence",
    "head": "colwise_loss",
}
"""The `Workload.tensor_plan` of a dense `Decoder`: two all-reduces per block in forward, two in backward."""

DECODER_EXPERTS = "blocks.*.feed.experts"
"""The `Workload.experts` path of a `Decoder` with experts."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder. `hidden` is the inner width of the SwiGLU layer.

    With `experts`, each block has this number of SwiGLU layers, and each token goes through `top_k` of them. `dropout`
    applies to the embedding and to the output of each layer, as in GPT-2, but not to attention weights.
    """

    num_blocks: int
    num_heads: int
    width: int
    hidden: int
    vocabulary: int = 256
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    dropout: float = 0.0


def decoder_plan(shape: DecoderShape) -> dict[str, str]:
    """The `Workload.tensor_plan` of a decoder of this shape. Experts are replicated along the tensor axis."""
    return {name: style for name, style in DECODER_PLAN.items() if not shape.experts or ".feed" not in name}


class Decoder(nn.Module):
    """Next-token logits: tokens (B, T) and positions (B, T), integers -> (B, T, V)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # layers that add to the residual stream start smaller the more of them there are (GPT-2)
                adds = name.endswith(("output.weight", "down.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.num_blocks) if adds else 1.0))
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T), (B, T) -> (B, T, V)."""
        stream = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            stream = block(stream, positions)
        return self.head(self.norm(stream))


class DecoderBlock(nn.Module):
    """Attention and a SwiGLU layer, or a mixture of them, added to the residual stream: (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed = MixtureOfExperts(shape) if shape.experts else SwiGLU(shape)
        self.attention_dropout, self.feed_dropout = nn.Dropout(shape.dropout), nn.Dropout(shape.dropout)

    def forward(self, stream: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (B, T, D)."""
        stream = stream + self.attention_dropout(self.attention(self.attention_norm(stream), positions))
        return stream + self.feed_dropout(self.feed(self.feed_norm(stream)))


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, stream: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (B, T, D)."""
        # The number of heads comes from the width that is here, which may be a shard: (B, heads, T, head_width).
        query, key, value = (
            layer(stream).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, positions), rotate(key, positions)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(F.silu(self.gate(stream)) * self.up(stream))


class MixtureOfExperts(nn.Module):
    """(B, T, D) -> (B, T, D): for each token, the sum of its `top_k` most probable experts.

    The sum is weighted by the router's probabilities. There is no capacity limit, so no token is dropped.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        tokens = stream.flatten(0, 1)
        # not normalised to 1 over those chosen: with top_k=1 that would leave the router without a gradient
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        return self.experts(tokens, chosen, weights).view_as(stream)


class Experts(nn.Module):
    """SwiGLU layers, stacked along dimension 0: tokens (N, D), chosen experts (N, K) and weights (N, K) -> (N, D)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(N, D), (N, K), (N, K) -> (N, D)."""
        order = chosen.flatten().argsort(stable=True)  # pairs of a token and a choice, expert after expert
        counts = F.one_hot(chosen.flatten(), len(self.gate)).sum(0).tolist()
        parts = tokens[order // chosen.shape[1]].split(counts)
        outputs = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            for rows, gate, up, down in zip(parts, self.gate, self.up, self.down, strict=True)
        ]
        by_token = torch.cat(outputs)[order.argsort()].view(*chosen.shape, tokens.shape[-1])
        return (by_token * weights[:, :, None]).sum(1).to(tokens.dtype)


def rotate(values: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn each pair of features by an angle that grows with the position: (B, heads, T, W), (B, T) -> same shape."""
    half = values.shape[-1] // 2
    angle_dtype = torch.promote_types(values.dtype, torch.float32)
    speeds = base ** (-torch.arange(half, device=values.device, dtype=angle_dtype) / half)
    angles = positions[:, None, :, None].to(angle_dtype) * speeds
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    left, right = values[..., :half], values[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
