"""Splits flat tensors into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["as_bytes", "chunk_slices", "chunks_of", "even_slices"]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a flat tensor as bytes."""
    return tensor.view(torch.uint8)


def chunk_slices(length: int, max_length: int) -> Iterator[slice]:
    """Yield slices of at most `max_length` elements that cover 0 to `length`."""
    for first in range(0, length, max_length):
        yield slice(first, min(length, first + max_length))


def chunks_of(tensor: Tensor, max_length: int) -> Sequence[Tensor]:
    """Return views of at most `max_length` elements that cover a flat tensor."""
    length = tensor.numel()  # len() of a tensor takes four times as long
    return [tensor] if 0 < length <= max_length else [tensor[span] for span in chunk_slices(length, max_length)]


def even_slices(length: int, count: int) -> list[slice]:
    """Return `count` slices that cover 0 to `length`, all of one size; the last ones may be shorter or empty."""
    step = -(-length // count)
    return [slice(min(length, step * index), min(length, step * (index + 1))) for index in range(count)]
