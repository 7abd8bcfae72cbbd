"""Joins the shards of ranks, and compares tensors up to rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from everyrank.rerun.shards import join_shards

__all__ = [
    "JoinedTensor",
    "as_reals",
    "constant_factor",
    "first_different_rates",
    "join_ranks",
    "relative_difference",
    "tolerance_of",
]

_RATE_TOLERANCE = 1e-6  # of learning rates


@dataclasses.dataclass(frozen=True)
class JoinedTensor:
    """The joined tensor of all ranks.

    tensor   in the shape that it has on one rank; None if the shards do not fit
    is_same  whether the copies of the ranks are equal; True for shards
    """

    tensor: Any
    is_same: bool = True


def join_ranks(rank_tensors: Sequence[Any], single: Any) -> JoinedTensor:
    """Join the tensors of all ranks, which are copies or shards, in the shape of the tensor of one rank."""
    if any(rank_tensor is None for rank_tensor in rank_tensors):
        return JoinedTensor(None)
    if all(rank_tensor.shape == single.shape for rank_tensor in rank_tensors):
        first = rank_tensors[0]
        return JoinedTensor(
            first, all(relative_difference(rank_tensor, first) < 1e-6 for rank_tensor in rank_tensors[1:])
        )
    return JoinedTensor(join_shards(rank_tensors, single.shape))


def relative_difference(first: Any, second: Any, scale: float = 0.0) -> float:
    """Return the norm of the difference relative to that of `second`, or to `scale` if that is larger.

    Tensors of different shapes differ infinitely. Elements that are NaN in both, or the same infinity, are equal.
    """
    import torch

    if first.shape != second.shape:
        return float("inf")
    if first.is_complex() != second.is_complex():
        first, second = first.to(torch.complex128), second.to(torch.complex128)
    first, second = as_reals(first), as_reals(second)
    norm = max(float(torch.linalg.vector_norm(second)), scale)
    difference = float(torch.linalg.vector_norm(first - second))
    if not (math.isfinite(difference) and math.isfinite(norm)):
        is_finite = first.isfinite() & second.isfinite()
        is_same = is_finite | (first == second) | (first.isnan() & second.isnan())
        if not bool(is_same.all()):
            return math.inf
        first, second = first[is_finite], second[is_finite]
        norm = max(float(torch.linalg.vector_norm(second)), scale)
        difference = float(torch.linalg.vector_norm(first - second))
    return difference / norm if norm else float(difference > 0.0)


def as_reals(tensor: Any) -> Any:
    """Return the numbers in float64; of a complex tensor the real and imaginary parts, as a last dimension."""
    import torch

    return torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) if tensor.is_complex() else tensor.double()


def constant_factor(pairs: Sequence[tuple[Any, Any]], tolerance: float = 1e-3) -> float | None:
    """The number c if the first tensor of each pair is c times the second; None if there is no such number."""
    import torch

    firsts = torch.cat([as_reals(first).flatten() for first, _ in pairs])
    seconds = torch.cat([as_reals(second).flatten() for _, second in pairs])
    size = float(seconds @ seconds)
    if not size:
        return None
    factor = float(firsts @ seconds) / size
    return factor if relative_difference(firsts, factor * seconds) < tolerance else None


def first_different_rates(rates: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """The learning rates of the first parameter group whose rates differ; None if there is none."""
    for rates_of_group in zip(*rates, strict=False):
        first, *others = rates_of_group
        if any(not math.isclose(first, other, rel_tol=_RATE_TOLERANCE) for other in others):
            return rates_of_group
    return None


def tolerance_of(tensors: Sequence[Any]) -> float | None:
    """The relative difference that rounding explains in the lowest precision; None for 16 bits or less."""
    import torch

    kinds = {tensor.real.dtype for tensor in tensors if tensor is not None and _has_fractions(tensor)}
    if kinds & {torch.float16, torch.bfloat16} or not kinds:
        return None
    return 5e-4 if torch.float32 in kinds else 1e-6  # parts of a model may compute in float32


def _has_fractions(tensor: Any) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
