"""Compare the ranks' values of a tensor with one device: the axes over which their sum or mean is equal to it.

If the sum is equal, each rank has a part and an all-reduce is missing. If the mean is equal, the average is missing.
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

__all__ = ["ROUNDING", "RankComparison", "axis_sets", "compare_ranks"]

ROUNDING = 1e-9  # relative to the largest element of a float64 tensor


class RankComparison(NamedTuple):
    """The ranks' local values of a tensor compared with one device.

    differing_axes   the axes along which ranks hold different values
    reducing_axes    the axes over which the ranks' sum or mean equals one device; () without such axes
    reduction        "sum", "mean", or "" if neither is equal
    """

    differing_axes: tuple[str, ...]
    reducing_axes: tuple[str, ...] = ()
    reduction: str = ""


def axis_sets(code: CustomParallelize) -> Iterator[tuple[str, ...]]:
    """Yield all sets of axes with more than one rank, the smallest sets first."""
    split_axes = [axis for axis, size in code.axes.items() if size > 1]
    for length in range(1, len(split_axes) + 1):
        yield from itertools.combinations(split_axes, length)


def compare_ranks(local: Tensor, expected: Tensor, code: CustomParallelize, world: World) -> RankComparison:
    """Compare `local` of every rank (of equal shape) with `expected` (identical on all ranks). A collective."""
    mesh = custom_device_mesh(code, world)
    allowed = ROUNDING * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-300)
    sets = list(axis_sets(code))
    flags: list[list[bool]] = []
    for axes in sets:
        total = local.detach().clone().contiguous()
        for axis in axes:
            dist.all_reduce(total, group=mesh.get_group(axis))
        mean = total / math.prod(code.axes[axis] for axis in axes)
        flags.append(
            [not _is_near(local, mean, allowed), _is_near(total, expected, allowed), _is_near(mean, expected, allowed)]
        )
    flags_of_ranks = torch.stack(
        [row.reshape(-1, 3) for row in all_gather(torch.tensor(flags, dtype=torch.int64), world)]
    )
    differ = tuple(
        axes[0] for axes, flag in zip(sets, flags_of_ranks.amax(0).tolist(), strict=True) if len(axes) == 1 and flag[0]
    )
    for axes, (_, is_sum, is_mean) in zip(sets, flags_of_ranks.amin(0).tolist(), strict=True):
        if differ and (is_sum or is_mean):
            return RankComparison(differ, axes, "sum" if is_sum else "mean")
    return RankComparison(differ)


def _is_near(left: Tensor, right: Tensor, allowed: float) -> bool:
    return left.shape == right.shape and (not left.numel() or float((left - right).abs().max()) <= allowed)
