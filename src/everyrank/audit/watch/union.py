"""The inputs of several forwards as those of one, and its outputs cut up again."""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from everyrank.audit.watch.kept import KeptBackward, ReplayError
from everyrank.audit.watch.recorder import tensors

__all__ = ["as_one_batch", "num_rows", "part_of", "wide"]


def wide(value: Any) -> Any:
    """A copy, floating-point tensors as float64."""

    def widened(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return one.to(torch.float64, copy=True) if one.is_floating_point() else one.clone()

    return tree_map(widened, value)


def part_of(out: Any, begin: int, end: int, total: int) -> Any:
    """Of an output the samples from `begin` to `end`; None where its first dim is not the samples."""
    return out[begin:end] if out.dim() and out.shape[0] == total else None


def num_rows(piece: KeptBackward) -> int:
    """How many samples a forward had: of its first tensor that has dims, the first."""
    return next((len(tensor) for tensor in tensors(piece.inputs) if tensor.dim()), 1)


def as_one_batch(inputs: Sequence[Any], sizes: list[int]) -> Any:
    """The inputs of several forwards as those of one: put together where they have a row for each sample."""
    flat = [tree_flatten(value) for value in inputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ReplayError("the inputs of its forwards are not alike")
    parts: list[Any] = []
    for leaves in zip(*(values for values, _ in flat), strict=True):
        if not isinstance(leaves[0], torch.Tensor):
            is_same = all(leaf == leaves[0] for leaf in leaves)
        elif all(leaf.dim() and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True)):
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                raise ReplayError("the inputs of its forwards have different lengths")
            parts.append(torch.cat(list(leaves)))
            continue
        else:
            is_same = all(leaf.shape == leaves[0].shape and torch.equal(leaf, leaves[0]) for leaf in leaves)
        if not is_same:
            raise ReplayError("inputs that have no row for each sample differ between its forwards")
        parts.append(leaves[0])
    return tree_unflatten(parts, flat[0][1])
