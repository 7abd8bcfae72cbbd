"""All-reduce algorithms written with send and receive, one per file, with a picture of the steps.

Each replaces a tensor of shape (length,) by its sum over the ranks, for any length and any number of ranks. A second
function returns the theoretical steps and bytes of each rank; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from everyrank.collectives.algorithms.halving import halving_all_reduce, halving_traffic
from everyrank.collectives.algorithms.hierarchical import hierarchical_all_reduce, hierarchical_traffic
from everyrank.collectives.algorithms.ring import ring_all_reduce, ring_traffic
from everyrank.collectives.algorithms.server import server_all_reduce, server_traffic
from everyrank.collectives.algorithms.tree import tree_all_reduce, tree_traffic
from everyrank.collectives.messages import Messages, Traffic

__all__ = ["ALGORITHMS", "Algorithm"]


class Algorithm(NamedTuple):
    """all_reduce: (tensor of shape (length,), messages), in place; traffic: (rank, size, length) -> Traffic."""

    all_reduce: Callable[[Tensor, Messages], None]
    traffic: Callable[[int, int, int], Traffic]


ALGORITHMS = {
    "ring": Algorithm(ring_all_reduce, ring_traffic),
    "halving": Algorithm(halving_all_reduce, halving_traffic),
    "tree": Algorithm(tree_all_reduce, tree_traffic),
    "server": Algorithm(server_all_reduce, server_traffic),
    "hierarchical": Algorithm(hierarchical_all_reduce, hierarchical_traffic),
}
"""By the names of `everyrank comm --algorithm`."""
