"""Arithmetic: cut a global batch into micro-batches first, then each of those over ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Slice", "cut", "micro_batches"]


@dataclass(frozen=True)
class Slice:
    """Part `index` of `count` parts; a count of 0 is who reads nothing."""

    index: int
    count: int


def cut(total: int, part: Slice) -> range:
    """The positions of one part of `total`; parts are contiguous and differ in size by at most one.

    >>> [cut(7, Slice(index, 3)) for index in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, left = divmod(total, part.count)
    start = part.index * size + min(part.index, left)
    return range(start, start + size + (part.index < left))


def micro_batches(total: int, accumulate: int) -> list[range]:
    """The positions of each micro-batch of a global batch; fewer than `accumulate` when samples are fewer."""
    return [cut(total, Slice(index, accumulate)) for index in range(min(total, accumulate))]
