"""Joins the shards of a tensor, which are split along one dimension or by the flattened tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["join_shards"]


def join_shards(shards: Sequence[Any], shape: Any) -> Any:
    """Join shards, in the order of the ranks, to a tensor of this shape; None if they do not fit."""
    import torch

    if sum(shard.numel() for shard in shards) != shape.numel():
        return None
    for dim in range(len(shape)):
        other_dims = {(*shard.shape[:dim], *shard.shape[dim + 1 :]) for shard in shards if shard.dim() == len(shape)}
        if other_dims == {(*shape[:dim], *shape[dim + 1 :])}:
            return torch.cat(list(shards), dim)
    return torch.cat([shard.flatten() for shard in shards]).view(shape)
