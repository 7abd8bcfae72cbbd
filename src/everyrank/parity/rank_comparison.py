"""Find the mesh axes over which the sum or mean of the ranks' tensors equals the tensor of one device.

If the sum is equal, a sum all-reduce is missing. If the mean is equal, an average over ranks is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.layout import CustomParallelize
from everyrank.parallel.custom import custom_device_mesh
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["ROUNDING", "RankComparison", "axes_of_ratio", "axis_sets", "compare_ranks", "ratio_text"]

ROUNDING = 1e-9  # relative to the largest element of a float64 tensor


class RankComparison(NamedTuple):
    """The ranks' local values of a tensor compared with one device.

    differing_axes   the axes along which ranks hold different values
    reducing_axes    the fewest axes over which the sum or mean equals one device; () if none, or if no ranks differ
    reduction        "sum" or "mean" over these axes; "" without such axes
    """

    differing_axes: tuple[str, ...]
    reducing_axes: tuple[str, ...] = ()
    reduction: str = ""


def axis_sets(custom: CustomParallelize) -> Iterator[tuple[str, ...]]:
    """Yield all non-empty sets of the axes that have more than one rank, the smallest sets first."""
    axes_above_size_one = [axis for axis, size in custom.axes.items() if size > 1]
    for length in range(1, len(axes_above_size_one) + 1):
        yield from itertools.combinations(axes_above_size_one, length)


def axes_of_ratio(custom: CustomParallelize, ratio: float, tolerance: float) -> tuple[str, ...] | None:
    """Return the smallest set of axes whose number of ranks, or its inverse, is `ratio`; None without one."""
    for axes in axis_sets(custom):
        size = math.prod(custom.axes[axis] for axis in axes)
        if min(abs(ratio / size - 1), abs(ratio * size - 1)) < tolerance:
            return axes
    return None


def ratio_text(ratio: float) -> str:
    """Describe a ratio for which `axes_of_ratio` has found axes."""
    return f"{'' if ratio > 1 else '1 / '}the number of ranks"


def compare_ranks(local: Tensor, expected: Tensor, custom: CustomParallelize, world: World) -> RankComparison:
    """Return how the tensors `local` of all ranks relate to `expected`. A collective.

    `local` must have the same shape on all ranks, and `expected` the same values.
    """
    mesh = custom_device_mesh(custom, world)
    tolerance = ROUNDING * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-300)
    sets = list(axis_sets(custom))
    checks: list[list[bool]] = []  # for each set: whether ranks differ, the sum is equal, the mean is equal
    for axes in sets:
        total = local.detach().clone().contiguous()
        for axis in axes:
            dist.all_reduce(total, group=mesh.get_group(axis))
        mean = total / math.prod(custom.axes[axis] for axis in axes)
        ranks_differ = not _is_near(local, mean, tolerance)
        checks.append([ranks_differ, _is_near(total, expected, tolerance), _is_near(mean, expected, tolerance)])
    checks_of_ranks = torch.stack(
        [row.reshape(-1, 3) for row in all_gather(torch.tensor(checks, dtype=torch.int64), world)]
    )
    differing_axes = tuple(
        axes[0]
        for axes, (differs, _, _) in zip(sets, checks_of_ranks.amax(0).tolist(), strict=True)
        if len(axes) == 1 and differs
    )
    for axes, (_, is_sum, is_mean) in zip(sets, checks_of_ranks.amin(0).tolist(), strict=True):
        if differing_axes and (is_sum or is_mean):
            return RankComparison(differing_axes, axes, "sum" if is_sum else "mean")
    return RankComparison(differing_axes)


def _is_near(left: Tensor, right: Tensor, tolerance: float) -> bool:
    return left.shape == right.shape and (not left.numel() or float((left - right).abs().max()) <= tolerance)
