"""Augmentation: plain functions of an image.

Random numbers come from torch's generator, which the loader seeds with (seed, epoch, sample). So the images do not
depend on the number of ranks and workers.
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
    """(C, H, W) uint8 -> float32: scaled to 0..1, minus the mean, divided by the deviation of each channel."""
    channel_shape = (-1, 1, 1)
    return (pixels.float() / 255 - torch.tensor(mean).view(channel_shape)) / torch.tensor(deviation).view(channel_shape)


def crop_with_padding(pixels: Tensor, padding: int) -> Tensor:
    """A random crop of the same size, (C, H, W), from the image with `padding` black pixels on each side."""
    height, width = pixels.shape[-2:]
    top, left = torch.randint(0, 2 * padding + 1, (2,)).tolist()
    return F.pad(pixels, (padding,) * 4)[..., top : top + height, left : left + width]


def flip(pixels: Tensor) -> Tensor:
    """Flip left to right, with probability 1/2."""
    return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels


def random_resized_crop(
    image: Image, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Image:
    """A random crop, resized to size x size. Its fraction of the area is in `scale`, its aspect ratio in `ratio`.

    Source: Szegedy et al. 2015, section 6
    """
    width, height = image.size
    for _ in range(10):
        area_position, ratio_position = torch.rand(2).tolist()
        area = width * height * (scale[0] + area_position * (scale[1] - scale[0]))
        aspect = math.exp(math.log(ratio[0]) + ratio_position * math.log(ratio[1] / ratio[0]))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(torch.randint(0, width - crop_width + 1, ()))
            top = int(torch.randint(0, height - crop_height + 1, ()))
            return _resized(image, size, (left, top, left + crop_width, top + crop_height))
    side = min(width, height)  # no crop fits into a long strip: take its middle
    left, top = (width - side) // 2, (height - side) // 2
    return _resized(image, size, (left, top, left + side, top + side))


def resize_and_centre_crop(image: Image, size: int) -> Image:
    """The central size x size of the image, after its shorter side was resized to size * 256 / 224."""
    width, height = image.size
    side = min(width, height) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def _resized(image: Image, size: int, box: tuple[float, float, float, float]) -> Image:
    return image.resize((size, size), resample=2, box=box)  # 2: bilinear, over all pixels under it
