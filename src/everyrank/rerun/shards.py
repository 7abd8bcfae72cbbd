"""Puts the parts of a tensor that ranks hold together: shards of one dimension, or of the flattened tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["put_together"]


def put_together(parts: Sequence[Any], shape: Any) -> Any:
    """The tensor of this shape that the parts make, in the order of the ranks; None if they make none."""
    import torch

    if sum(part.numel() for part in parts) != shape.numel():
        return None
    for dim in range(len(shape)):
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts if part.dim() == len(shape)}
        if others == {(*shape[:dim], *shape[dim + 1 :])}:
            return torch.cat(list(parts), dim)
    return torch.cat([part.flatten() for part in parts]).view(shape)
