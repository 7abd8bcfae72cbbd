"""A small convolutional network for small images."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NUM_GROUPS", "ConvNet"]

NUM_GROUPS = 4
"""Groups of channels of `norm="group"`."""


class ConvNet(nn.Module):
    """Three blocks, a pool, a linear layer: (B, 1, H, W) -> (B, num_classes).

    `norm` is batch (statistics span the samples: the ranks have to agree on them) or group (they do not); `dropout` is
    of what the linear layer looks at.
    """

    def __init__(self, width: int = 16, num_classes: int = 10, norm: str = "batch", dropout: float = 0.0) -> None:
        super().__init__()
        channels = [1, width, 2 * width, 4 * width]
        pairs = itertools.pairwise(channels)
        self.blocks = nn.ModuleList(
            ResidualBlock(*pair, stride, norm) for pair, stride in zip(pairs, (1, 2, 1), strict=True)
        )
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(4 * channels[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, num_classes)."""
        features = images
        for block in self.blocks:
            features = block(features)
        # An average, not a maximum: the empty corners of two images tie, and rounding alone would break the ties.
        return self.classes(self.dropout(F.adaptive_avg_pool2d(features, 2).flatten(1)))


class ResidualBlock(nn.Module):
    """A convolution, a norm, a ReLU: (B, C, H, W) -> (B, C', H / stride, W / stride)."""

    def __init__(self, before: int, after: int, stride: int, norm: str) -> None:
        super().__init__()
        # no bias: the norm that follows would take it out again
        self.convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(NUM_GROUPS, after)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        return F.relu(self.norm(self.convolution(features)))
