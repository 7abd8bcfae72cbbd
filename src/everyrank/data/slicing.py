"""Split a global batch into micro-batches, then each micro-batch over ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Slice", "cut", "micro_batches"]


@dataclass(frozen=True)
class Slice:
    """Part `index` of `count` parts; `count` is 0 for a rank that reads nothing."""

    index: int
    count: int


def cut(total: int, reads: Slice) -> range:
    """Return the positions of one part of `total`; parts are contiguous and differ in size by at most one.

    >>> [cut(7, Slice(index, 3)) for index in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, left = divmod(total, reads.count)
    start = reads.index * size + min(reads.index, left)
    return range(start, start + size + (reads.index < left))


def micro_batches(total: int, accumulate: int) -> list[range]:
    """Return the positions of each micro-batch of a global batch; at most one micro-batch per sample."""
    return [cut(total, Slice(index, accumulate)) for index in range(min(total, accumulate))]
