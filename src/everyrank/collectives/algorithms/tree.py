r"""All-reduce along a binary tree: few steps, but the whole tensor on every link; good for small tensors.

Sums go up from the leaves to rank 0; the total comes down the same way. The parent of rank r is rank (r - 1) // 2:

            0                up:   3 and 4 send to 1, 5 and 6 to 2; then 1 and 2 send their sums to 0
          /   \              down: 0 sends the total to 1 and 2, these to 3, 4, 5 and 6
         1     2
        / \   / \
       3   4 5   6

It needs about 2 log2 N sequential messages of the whole tensor: good if the latency of a message costs more than its
bytes. (NCCL's double binary tree has a tree for each half of the tensor; every rank is a leaf of one of them. It needs
the same number of steps, and all links are busy.)
Source: Sanders, Speck and Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyrank.collectives.messages import Messages, Traffic

__all__ = ["tree_all_reduce", "tree_traffic"]


def tree_all_reduce(tensor: Tensor, messages: Messages) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks."""
    parent, children = _parent_and_children(messages.rank, messages.size)
    received = torch.empty_like(tensor)
    for child in children:
        messages.receive(received, child)
        tensor += received
    if parent is not None:
        messages.send(tensor, parent)
        messages.receive(tensor, parent)
    for child in children:
        messages.send(tensor, child)


def _parent_and_children(rank: int, size: int) -> tuple[int | None, list[int]]:
    parent = (rank - 1) // 2 if rank else None
    return parent, [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]


def tree_traffic(rank: int, size: int, length: int) -> Traffic:
    """Return the steps and the sent elements of one rank, by theory: one message to and from each neighbour."""
    parent, children = _parent_and_children(rank, size)
    num_neighbours = len(children) + (parent is not None)
    return Traffic(2 * num_neighbours, num_neighbours * length)
