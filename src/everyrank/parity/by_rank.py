"""What each rank has of a tensor, held against one device: the axes over which their sum, or their mean, is that.

A sum: each rank has a part of it, and nothing adds them up. A mean: each rank has its own, and nothing averages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.layout import OwnCode
from everyrank.parallel.own import own_device_mesh
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["ROUNDING", "ByRank", "by_rank", "long_axes"]

ROUNDING = 1e-9  # of the largest number of a tensor, float64


class ByRank(NamedTuple):
    """How the ranks' own values of a tensor compare with one device.

    differ    the axes along which ranks hold different values
    completes the axes over which the ranks' sum or mean is that of one device; () where none does
    how       "sum", "mean", or "" where neither is
    """

    differ: tuple[str, ...]
    completes: tuple[str, ...] = ()
    how: str = ""


def long_axes(code: OwnCode) -> Iterator[tuple[str, ...]]:
    """Sets of the axes that are longer than one rank, small ones first."""
    long = [axis for axis, size in code.axes.items() if size > 1]
    for length in range(1, len(long) + 1):
        yield from itertools.combinations(long, length)


def by_rank(own: Tensor, expected: Tensor, code: OwnCode, world: World) -> ByRank:
    """Hold `own` of every rank, of the same shape on all, against `expected`, the same on all. A collective."""
    mesh = own_device_mesh(code, world)
    allowed = ROUNDING * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-300)
    sets = list(long_axes(code))
    flags: list[list[bool]] = []
    for axes in sets:
        total = own.detach().clone().contiguous()
        for axis in axes:
            dist.all_reduce(total, group=mesh.get_group(axis))
        mean = total / math.prod(code.axes[axis] for axis in axes)
        flags.append(
            [not _is_near(own, mean, allowed), _is_near(total, expected, allowed), _is_near(mean, expected, allowed)]
        )
    found = torch.stack([row.reshape(-1, 3) for row in all_gather(torch.tensor(flags, dtype=torch.int64), world)])
    differ = tuple(
        axes[0] for axes, flag in zip(sets, found.amax(0).tolist(), strict=True) if len(axes) == 1 and flag[0]
    )
    for axes, (_, is_sum, is_mean) in zip(sets, found.amin(0).tolist(), strict=True):
        if differ and (is_sum or is_mean):
            return ByRank(differ, axes, "sum" if is_sum else "mean")
    return ByRank(differ)


def _is_near(one: Tensor, other: Tensor, allowed: float) -> bool:
    return one.shape == other.shape and (not one.numel() or float((one - other).abs().max()) <= allowed)
