"""Finds the first line of the script whose result on N ranks differs from that on one rank."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from everyrank.relations.numbers import as_reals, relative_difference
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["DifferingLine", "ScaledLine", "first_differing", "first_scaled"]

_MIN_TOLERANCE = 1e-6  # relative
_FIT_TOLERANCE = 1e-5  # relative; random numbers do not fit a factor and a shift
_MIN_CHANGE = 1e-3  # of a factor, or of a shift relative to the largest number
_MIN_NUMBERS = 8  # to fit a factor and a shift


@dataclasses.dataclass(frozen=True)
class DifferingLine:
    """A line and operation whose results on N ranks and on one rank do not match.

    is_of_forward  whether the line runs before the first backward
    sums  earlier lines whose results are numbers that the ranks sum; averaging gradients divides these
    """

    location: str
    operation: str
    ranks: list[float]
    single: float
    is_of_forward: bool
    sums: tuple[str, ...]


def first_differing(many: ScriptRecording, single: RankRecording, tolerance: float) -> DifferingLine | None:
    """Compare the results of the first update in their order, and return the first difference.

    The results of the ranks may be equal to that of one rank, be rows of it, or have it as their mean or sum. The first
    result for which none of this holds is the difference.
    """
    counts = [_counts(rank) for rank in (*many.ranks, single)]
    sums: list[str] = []
    for key, value in single.values.items():
        location, operation, _ = key
        if any(count[location, operation] != counts[-1][location, operation] for count in counts):
            continue
        rank_values = [rank.values[key].tensor for rank in many.ranks]
        is_float = value.tensor.is_floating_point()
        if not is_float and any(rank_value.shape != value.tensor.shape for rank_value in rank_values):
            continue  # integers may be indices of samples within a rank
        relation = _relation(rank_values, value.tensor, max(tolerance, _MIN_TOLERANCE))
        if relation == "sum" and not value.tensor.dim() and "." not in operation and location not in sums:
            sums.append(location)
        if relation == "":
            numbers = [_number(rank_value) for rank_value in rank_values]
            earlier_sums = tuple(each for each in sums if each != location)
            return DifferingLine(location, operation, numbers, _number(value.tensor), value.is_of_forward, earlier_sums)
    return None


@dataclasses.dataclass(frozen=True)
class ScaledLine:
    """A line whose result on each rank is the rank's rows of the single result, multiplied by a factor and shifted.

    scalar_location  the first earlier line that computes a different number on one rank; "" if there is none
    factors, shifts  one of each rank: its rows are factor * rows + shift
    """

    location: str
    scalar_location: str
    factors: list[float]
    shifts: list[float]


def first_scaled(many: ScriptRecording, single: RankRecording) -> ScaledLine | None:
    """Return the first line of the first update with different rows, if these are only scaled or shifted."""
    scalar_location = ""
    counts = [_counts(rank) for rank in (*many.ranks, single)]
    for key, value in single.values.items():
        location, operation, _ = key
        if any(count[location, operation] != counts[-1][location, operation] for count in counts):
            continue
        rank_values = [rank.values[key].tensor for rank in many.ranks]
        if not value.tensor.is_floating_point() or _relation(rank_values, value.tensor, _MIN_TOLERANCE):
            continue
        if value.tensor.numel() == 1:
            scalar_location = scalar_location or location
            continue
        fits = _fits(rank_values, value.tensor)
        factors, shifts = [factor for factor, _ in fits], [shift for _, shift in fits]
        size = float(value.tensor.abs().max())
        changes = [abs(factor - 1) > _MIN_CHANGE or abs(shift) > _MIN_CHANGE * size for factor, shift in fits]
        # Rank 0 and a single rank draw the same random numbers, for example the factor of mixup. A number that is
        # computed from data differs on rank 0, too, unless a tensor shows where it comes from (a maximum).
        is_drawn = bool(changes) and not changes[0] and not scalar_location
        return ScaledLine(location, scalar_location, factors, shifts) if any(changes) and not is_drawn else None
    return None


def _fits(rank_values: list[Any], single: Any) -> list[tuple[float, float]]:
    """Return (factor, shift) of each rank's rows; [] if they do not fit."""
    import torch

    sizes = [len(rank_value) for rank_value in rank_values if rank_value.dim()]
    if len(sizes) < len(rank_values) or not single.dim() or sum(sizes) != len(single):
        return []
    fits: list[tuple[float, float]] = []
    for rank_value, rows in zip(rank_values, single.split(sizes), strict=True):
        if rank_value.shape != rows.shape or rows.numel() < _MIN_NUMBERS:
            return []
        columns = torch.stack([rows.double().flatten(), torch.ones(rows.numel(), dtype=torch.float64)], 1)
        factor, shift = torch.linalg.lstsq(columns, rank_value.double().flatten()).solution.tolist()
        if relative_difference(factor * rows.double() + shift, rank_value) > _FIT_TOLERANCE:
            return []
        fits.append((factor, shift))
    return fits


def _counts(rank: RankRecording) -> collections.Counter[tuple[str, str]]:
    return collections.Counter((location, operation) for location, operation, _ in rank.values)


def _number(tensor: Any) -> float:
    import torch

    is_real_scalar = not tensor.dim() and not tensor.is_complex()
    return float(tensor.double()) if is_real_scalar else float(torch.linalg.vector_norm(as_reals(tensor)))


def _relation(rank_values: list[Any], single: Any, tolerance: float) -> str:
    """How the results of the ranks relate to that of one rank: "same", "rows", "mean", "sum", or "" if they differ."""
    import torch

    if all(rank_value.shape == single.shape for rank_value in rank_values):
        if all(relative_difference(rank_value, single) < tolerance for rank_value in rank_values):
            return "same"
        total = sum(as_reals(rank_value) for rank_value in rank_values)
        scale = float(max(torch.linalg.vector_norm(as_reals(rank_value)) for rank_value in rank_values))
        if relative_difference(total / len(rank_values), as_reals(single), scale) < tolerance:
            return "mean"
        if relative_difference(total, as_reals(single), scale) < tolerance:
            return "sum"
        return ""
    if len(rank_values[0].shape) == len(single.shape):
        for dim in range(single.dim()):
            shapes = [rank_value.shape[:dim] + rank_value.shape[dim + 1 :] for rank_value in rank_values]
            if any(shape != single.shape[:dim] + single.shape[dim + 1 :] for shape in shapes):
                continue
            if sum(rank_value.shape[dim] for rank_value in rank_values) == single.shape[dim]:
                return "rows" if relative_difference(torch.cat(rank_values, dim), single) < tolerance else ""
    if (
        sum(rank_value.numel() for rank_value in rank_values) == single.numel()
        and rank_values[0].dim() == single.dim() == 1
    ):
        return "rows"
    return "rows" if not _is_comparable(rank_values, single) else ""


def _is_comparable(rank_values: list[Any], single: Any) -> bool:
    """Whether the shapes allow a comparison, which is not the case for flattened batches of several dimensions."""
    return all(rank_value.shape == single.shape for rank_value in rank_values)
