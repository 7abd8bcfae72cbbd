"""Augmentation: plain functions of an image. What they draw comes from torch's generator, which the loader seeds with
(seed, epoch, sample): the same images whatever the ranks and workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "crop_with_padding",
    "flip",
    "normalise",
    "random_resized_crop",
    "resize_and_centre_crop",
    "to_pixels",
]


def to_pixels(image: Image) -> Tensor:
    """An RGB image as (3, H, W), uint8."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def normalise(pixels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """(C, H, W) uint8 -> float32: from 0 to 1, then without the mean and divided by the deviation of each channel."""
    along = (-1, 1, 1)
    return (pixels.float() / 255 - torch.tensor(mean).view(along)) / torch.tensor(deviation).view(along)


def crop_with_padding(pixels: Tensor, padding: int) -> Tensor:
    """(C, H, W) of the same size, from a random place of the image with `padding` black pixels around it."""
    height, width = pixels.shape[-2:]
    top, left = torch.randint(0, 2 * padding + 1, (2,)).tolist()
    return F.pad(pixels, (padding,) * 4)[..., top : top + height, left : left + width]


def flip(pixels: Tensor) -> Tensor:
    """Left to right, for every second image."""
    return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels


def random_resized_crop(
    image: Image, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Image:
    """A random part of the image, of a share of its area and a ratio of its sides drawn from these, as size x size.

    Source: Szegedy et al. 2015, section 6
    """
    width, height = image.size
    for _ in range(10):
        share, position = torch.rand(2).tolist()
        area = width * height * (scale[0] + share * (scale[1] - scale[0]))
        shape = math.exp(math.log(ratio[0]) + position * math.log(ratio[1] / ratio[0]))
        own_width, own_height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < own_width <= width and 0 < own_height <= height:
            left = int(torch.randint(0, width - own_width + 1, ()))
            top = int(torch.randint(0, height - own_height + 1, ()))
            return _resized(image, size, (left, top, left + own_width, top + own_height))
    side = min(width, height)  # a long strip: the middle of it
    left, top = (width - side) // 2, (height - side) // 2
    return _resized(image, size, (left, top, left + side, top + side))


def resize_and_centre_crop(image: Image, size: int) -> Image:
    """The middle of the image: its shorter side is made size * 256 / 224, and size x size is cut out."""
    width, height = image.size
    side = min(width, height) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def _resized(image: Image, size: int, box: tuple[float, float, float, float]) -> Image:
    return image.resize((size, size), resample=2, box=box)  # 2: bilinear, over all pixels under it
