"""Puts the shards of ranks together, and compares tensors up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from everyrank.rerun.shards import put_together

__all__ = ["Whole", "constant_factor", "relative_difference", "tolerance_of", "whole"]


@dataclasses.dataclass(frozen=True)
class Whole:
    """The tensor of all ranks.

    tensor   in the shape of one rank's; None if the parts do not make one
    is_same  whether all ranks that hold all of it hold the same
    """

    tensor: Any
    is_same: bool = True


def whole(parts: Sequence[Any], like: Any) -> Whole:
    """The parts of all ranks in the shape of the tensor of one rank: equal copies, or shards."""
    if any(part is None for part in parts):
        return Whole(None)
    if all(part.shape == like.shape for part in parts):
        first = parts[0]
        return Whole(first, all(relative_difference(part, first) < 1e-6 for part in parts[1:]))
    return Whole(put_together(parts, like.shape))


def relative_difference(one: Any, other: Any, scale: float = 0.0) -> float:
    """The norm of the difference relative to that of `other`, or to `scale` if that is larger."""
    import torch

    one, other = one.double(), other.double()
    size = max(float(torch.linalg.vector_norm(other)), scale)
    difference = float(torch.linalg.vector_norm(one - other))
    if difference != difference:  # NaN in both is the same training
        return 0.0 if torch.equal(one.isnan(), other.isnan()) else float("inf")
    return difference / size if size else float(difference > 0.0)


def constant_factor(pairs: Sequence[tuple[Any, Any]], tolerance: float = 1e-3) -> float | None:
    """The number c for which the first of each pair is c times the second; None if there is no such number."""
    import torch

    firsts = torch.cat([first.double().flatten() for first, _ in pairs])
    seconds = torch.cat([second.double().flatten() for _, second in pairs])
    size = float(seconds @ seconds)
    if not size:
        return None
    factor = float(firsts @ seconds) / size
    return factor if relative_difference(firsts, factor * seconds) < tolerance else None


def tolerance_of(tensors: Sequence[Any]) -> float | None:
    """The relative difference that rounding explains, by the lowest precision; None for 16 bits and less."""
    import torch

    kinds = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    if kinds & {torch.float16, torch.bfloat16} or not kinds:
        return None
    return 5e-4 if torch.float32 in kinds else 1e-7
