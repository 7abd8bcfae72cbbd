"""Flatten many tensors into one for a single collective, and split it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["buckets", "flatten", "pieces", "write_back"]


def buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Group tensors of one dtype, in order, into buckets of up to `most_bytes` (or one tensor); equal on every rank."""
    result: list[list[Tensor]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        size = most_bytes + 1  # the first begins a bucket, also where it is empty
        for tensor in (tensor for tensor in tensors if tensor.dtype is dtype):
            if size + tensor.nbytes > most_bytes:
                result.append([])
                size = 0
            result[-1].append(tensor)
            size += tensor.nbytes
    return result


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate all elements of tensors of one dtype: a copy, shape (sum of numel,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def pieces(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into views with the shape of each tensor."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy its slice of `flat` into each tensor, in place."""
    for tensor, piece in zip(tensors, pieces(flat, tensors), strict=True):
        tensor.copy_(piece)
