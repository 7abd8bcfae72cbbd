r"""All-reduce through one rank, as in a parameter server: simple, but all data passes through that rank.

    rank 1 --\                      /--> rank 1
    rank 2 ---> rank 0 adds up ------> rank 2        in turn: 2 (N - 1) whole tensors over one link
    rank 3 --/                      \--> rank 3

A worker sends one tensor and receives one; rank 0 receives and sends N - 1 of each, so the time grows with N, while
that of the ring hardly does.
Source: Li et al. 2014, Scaling distributed machine learning with the parameter server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyrank.collectives.messages import Messages, Traffic

__all__ = ["server_all_reduce", "server_traffic"]


def server_all_reduce(tensor: Tensor, messages: Messages) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks."""
    if messages.rank != 0:
        messages.send(tensor, 0)
        messages.receive(tensor, 0)
        return
    received = torch.empty_like(tensor)
    for worker in range(1, messages.size):
        messages.receive(received, worker)
        tensor += received
    for worker in range(1, messages.size):
        messages.send(tensor, worker)


def server_traffic(rank: int, size: int, length: int) -> Traffic:
    """Return the steps and the sent elements of one rank, by the theory of the algorithm."""
    num_messages = size - 1 if rank == 0 else 1
    return Traffic(2 * num_messages, num_messages * length) if size > 1 else Traffic()
