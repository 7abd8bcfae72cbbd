"""Residual networks, for images of 224 pixels and for those of 32.

B  batch     C  channels     H, W  pixels

Source: He et al., CVPR 2016; the stride stands in the 3 x 3 convolution of a bottleneck, as most have it since. The
stem for small images is that of section 4.2 there: one 3 x 3 convolution, no pooling.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RESNET_DEPTHS", "ResNet"]

RESNET_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_BOTTLENECK_FROM = 50


class ResNet(nn.Module):
    """(B, 3, H, W) -> (B, num_classes). `small_images` takes the stem for 32 x 32."""

    def __init__(self, depth: int, num_classes: int, small_images: bool = False, width: int = 64) -> None:
        super().__init__()
        kind = Bottleneck if depth >= _BOTTLENECK_FROM else Basic
        self.small_images = small_images
        size, stride, padding = (3, 1, 1) if small_images else (7, 2, 3)
        self.stem = nn.Conv2d(3, width, size, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        before = width
        for stage, count in enumerate(RESNET_DEPTHS[depth]):
            for index in range(count):
                inner = width * 2**stage
                blocks.append(kind(before, inner, stride=2 if stage > 0 and index == 0 else 1))
                before = inner * kind.expansion
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(before, num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_classes)."""
        features = F.relu(self.norm(self.stem(images)))
        if not self.small_images:
            features = F.max_pool2d(features, 3, 2, 1)
        for block in self.blocks:
            features = block(features)
        return self.classes(features.mean((2, 3)))


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: (B, C, H, W) -> (B, inner, H / stride, W / stride)."""

    expansion = 1

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, inner, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, inner, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(inner)
        self.shortcut = _shortcut(before, inner, stride)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, inner, H / stride, W / stride)."""
        inner = F.relu(self.first_norm(self.first(features)))
        return F.relu(self.last_norm(self.second(inner)) + self.shortcut(features))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 beside a shortcut: (B, C, H, W) -> (B, 4 inner, H / stride, W / stride)."""

    expansion = 4

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, inner, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(inner)
        self.third = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(4 * inner)
        self.shortcut = _shortcut(before, 4 * inner, stride)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 4 inner, H / stride, W / stride)."""
        inner = F.relu(self.first_norm(self.first(features)))
        inner = F.relu(self.second_norm(self.second(inner)))
        return F.relu(self.last_norm(self.third(inner)) + self.shortcut(features))


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    """Nothing where the shapes agree; else a projection (option B of the paper)."""
    if before == after and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


def _initialise(module: nn.Module) -> None:
    """He et al. 2015 for convolutions; a block begins as its shortcut (Goyal et al. 2017, section 5.1)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, Basic | Bottleneck):
        nn.init.zeros_(module.last_norm.weight)
