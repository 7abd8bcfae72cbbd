"""Splits the blocks of a model into stages of about equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

__all__ = ["balance", "cost", "own_cost"]


def cost(module: nn.Module) -> int:
    """Return the multiplications per position: the elements of all matrices, without embeddings."""
    return sum(own_cost(child) for child in module.modules())


def own_cost(module: nn.Module) -> int:
    """Return the cost of a module without its submodules."""
    if isinstance(module, nn.Embedding):
        return 0
    return sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.dim() >= 2)


def balance(costs: Sequence[int], parts: int) -> list[range]:
    """Split blocks into contiguous parts of at least one block, with the smallest possible largest cost.

    >>> balance([1, 1, 1, 3], 2)
    [range(0, 3), range(3, 4)]
    """
    before = [0, *itertools.accumulate(costs)]
    count = len(costs)
    best: list[list[tuple[int, int]]] = [[(before[end], 0) for end in range(count + 1)]]
    for stage in range(1, parts):
        row: list[tuple[int, int]] = []
        for end in range(count + 1):
            # at least one block in this part, and in each before it
            options = [(max(best[-1][first][0], before[end] - before[first]), first) for first in range(stage, end)]
            row.append(min(options, default=(before[-1] + 1, 0)))
        best.append(row)
    cuts = [count]
    for stage in range(parts - 1, 0, -1):
        cuts.append(best[stage][cuts[-1]][1])
    cuts = [0, *reversed(cuts)]
    return [range(first, end) for first, end in itertools.pairwise(cuts)]
