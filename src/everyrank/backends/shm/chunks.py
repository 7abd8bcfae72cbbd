"""Flat tensors in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["as_bytes", "chunks_of", "ranges_of", "slices_of"]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a flat tensor."""
    return tensor.view(torch.uint8)


def ranges_of(length: int, longest: int) -> Iterator[slice]:
    """0 to `length` in slices of at most `longest`."""
    for first in range(0, length, longest):
        yield slice(first, min(length, first + longest))


def chunks_of(tensor: Tensor, longest: int) -> Sequence[Tensor]:
    """A flat tensor in chunks of at most `longest` elements."""
    length = tensor.numel()  # len() of a tensor takes four times as long
    return [tensor] if 0 < length <= longest else [tensor[span] for span in ranges_of(length, longest)]


def slices_of(length: int, count: int) -> list[slice]:
    """0 to `length` in `count` slices, equal ones first; the last may be shorter or empty."""
    step = -(-length // count)
    return [slice(min(length, step * index), min(length, step * (index + 1))) for index in range(count)]
