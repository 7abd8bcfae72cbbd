"""Finds the first line of the script whose result on N ranks is not that of one rank."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from everyrank.relations.numbers import relative_difference
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["Differing", "first_differing"]

_ROUNDED = 1e-6  # relative


@dataclasses.dataclass(frozen=True)
class Differing:
    """A line and operation whose results do not go together.

    is_of_forward  whether the line runs before the first backward
    sums  earlier lines whose scalar results are sums over the ranks, which a mean of gradients divides
    """

    place: str
    operation: str
    ranks: list[float]
    one: float
    is_of_forward: bool
    sums: tuple[str, ...]


def first_differing(many: ScriptRecording, one: RankRecording, tolerance: float) -> Differing | None:
    """Go through the results of the first update in their order.

    The results of ranks may be rows of one rank's, equal to it, or have it as their mean or sum. The first result that
    is none of these is where the ranks begin to compute something else.
    """
    counts = [_counts(rank) for rank in (*many.ranks, one)]
    sums: list[str] = []
    for key, value in one.values.items():
        place, operation, _ = key
        if any(count[place, operation] != counts[-1][place, operation] for count in counts):
            continue
        parts = [rank.values[key].tensor for rank in many.ranks]
        is_float = value.tensor.is_floating_point()
        if not is_float and any(part.shape != value.tensor.shape for part in parts):
            continue  # whole numbers of each rank's samples may count within the rank
        kind = _kind(parts, value.tensor, max(tolerance, _ROUNDED))
        if kind == "sum" and not value.tensor.dim() and "." not in operation and place not in sums:
            sums.append(place)
        if kind == "":
            numbers = [_number(part) for part in parts]
            before = tuple(each for each in sums if each != place)
            return Differing(place, operation, numbers, _number(value.tensor), value.is_of_forward, before)
    return None


def _counts(rank: RankRecording) -> collections.Counter[tuple[str, str]]:
    return collections.Counter((place, operation) for place, operation, _ in rank.values)


def _number(tensor: Any) -> float:
    import torch

    return float(tensor.double()) if not tensor.dim() else float(torch.linalg.vector_norm(tensor.double()))


def _kind(parts: list[Any], one: Any, tolerance: float) -> str:
    """How the results of the ranks go together: "same", "rows", "mean", "sum"; "" if they do not."""
    import torch

    if all(part.shape == one.shape for part in parts):
        if all(relative_difference(part, one) < tolerance for part in parts):
            return "same"
        total = sum(part.double() for part in parts)
        scale = float(max(torch.linalg.vector_norm(part.double()) for part in parts))
        if relative_difference(total / len(parts), one, scale) < tolerance:
            return "mean"
        if relative_difference(total, one, scale) < tolerance:
            return "sum"
        return ""
    if len(parts[0].shape) == len(one.shape):
        for dim in range(one.dim()):
            shapes = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
            if any(shape != one.shape[:dim] + one.shape[dim + 1 :] for shape in shapes):
                continue
            if sum(part.shape[dim] for part in parts) == one.shape[dim]:
                return "rows" if relative_difference(torch.cat(parts, dim), one) < tolerance else ""
    if sum(part.numel() for part in parts) == one.numel() and parts[0].dim() == one.dim() == 1:
        return "rows"
    return "rows" if not _is_comparable(parts, one) else ""


def _is_comparable(parts: list[Any], one: Any) -> bool:
    """Whether shapes allow a comparison; flattened batches of more dimensions do not."""
    return all(part.shape == one.shape for part in parts)
