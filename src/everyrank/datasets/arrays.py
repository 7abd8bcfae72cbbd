"""A dataset of images that fit into memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

from torch import Tensor
from torch.utils.data import Dataset

from everyrank.errors import WorkloadError

__all__ = ["Images"]


class Images(Dataset[tuple[Tensor, int]]):
    """(pixels changed by `transform`, label).

    pixels      (N, C, H, W), uint8
    labels      (N,), int64
    transform   (C, H, W) uint8 -> what the model takes
    random      whether `transform` draws numbers: then they become a function of (seed, epoch, sample)

    Raises `WorkloadError` where there are not as many labels as images.
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor], random: bool = False
    ) -> None:
        if len(pixels) != len(labels):
            raise WorkloadError(f"{len(pixels)} images, but {len(labels)} labels")
        self.pixels, self.labels, self.transform = pixels, labels, transform
        self.deterministic = not random

    @functools.cached_property
    def checksum(self) -> str:
        """The checksum of all pixels and labels; computed on demand, on rank 0 only."""
        content = hashlib.sha256(self.pixels.numpy().tobytes())
        content.update(self.labels.numpy().tobytes())
        return f"sha256:{content.hexdigest()}"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.pixels[index]), int(self.labels[index])
