"""Finds the first line of the script whose result on N ranks is not that of one rank."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from everyrank.relations.numbers import relative_difference
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["Differing", "Scaled", "first_differing", "first_scaled"]

_ROUNDED = 1e-6  # relative
_FITTED = 1e-5  # relative: no random numbers look like a factor and a shift
_ENOUGH_TO_FIT = 8  # numbers for a factor and a shift


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


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A line whose result has the right rows on each rank, but multiplied by a number, or shifted by one.

    numbers  the line of the first single number before it that is another one on one rank; "" if there is none
    factors, shifts  one of each rank: its rows are factor * (rows of one rank) + shift
    """

    place: str
    numbers: str
    factors: list[float]
    shifts: list[float]


def first_scaled(many: ScriptRecording, one: RankRecording) -> Scaled | None:
    """The first line of the first update whose rows do not go together, if they are only scaled or shifted."""
    numbers = ""
    counts = [_counts(rank) for rank in (*many.ranks, one)]
    for key, value in one.values.items():
        place, operation, _ = key
        if any(count[place, operation] != counts[-1][place, operation] for count in counts):
            continue
        parts = [rank.values[key].tensor for rank in many.ranks]
        if not value.tensor.is_floating_point() or _kind(parts, value.tensor, _ROUNDED):
            continue
        if value.tensor.numel() == 1:
            numbers = numbers or place
            continue
        fits = _fits(parts, value.tensor)
        return Scaled(place, numbers, [a for a, _ in fits], [b for _, b in fits]) if fits else None
    return None


def _fits(parts: list[Any], one: Any) -> list[tuple[float, float]]:
    """(factor, shift) of each rank's rows; [] if they are not made so."""
    import torch

    sizes = [len(part) for part in parts if part.dim()]
    if len(sizes) < len(parts) or not one.dim() or sum(sizes) != len(one):
        return []
    fits: list[tuple[float, float]] = []
    for part, rows in zip(parts, one.split(sizes), strict=True):
        if part.shape != rows.shape or rows.numel() < _ENOUGH_TO_FIT:
            return []
        known = torch.stack([rows.double().flatten(), torch.ones(rows.numel(), dtype=torch.float64)], 1)
        target = part.double().flatten()
        factor, shift = torch.linalg.lstsq(known, target).solution.tolist()
        if relative_difference(factor * rows.double() + shift, part) > _FITTED:
            return []
        fits.append((factor, shift))
    return fits


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
