"""Many tensors as one, so that one collective carries them all; and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["buckets", "flatten", "pieces", "write_back"]


def buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """The tensors in order, by dtype, in buckets of up to `most_bytes` or one tensor: the same on every rank."""
    found: list[list[Tensor]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        size = most_bytes + 1  # the first begins a bucket, also where it is empty
        for tensor in (tensor for tensor in tensors if tensor.dtype is dtype):
            if size + tensor.nbytes > most_bytes:
                found.append([])
                size = 0
            found[-1].append(tensor)
            size += tensor.nbytes
    return found


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements, one tensor after the other, of one dtype: a copy, shape (sum of numel,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def pieces(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of what `flatten` gave, the views that stand for each tensor, in its shape."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy its piece of `flat` into each tensor, in place."""
    for tensor, piece in zip(tensors, pieces(flat, tensors), strict=True):
        tensor.copy_(piece)
