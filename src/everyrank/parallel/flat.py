"""Many tensors as one, so that one collective carries them all; and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["flatten", "pieces", "write_back"]


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
