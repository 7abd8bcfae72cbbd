"""All-reduce around a ring: every link is always busy, and carries less than twice the tensor.

The tensor is split into one part per rank. In the first round of N - 1 steps each part goes once around
and is added up on its way (reduce-scatter); in the second the sums go around (all-gather). Three ranks, parts a b c:

              rank 0          rank 1          rank 2
    start     a0  b0  c0      a1  b1  c1      a2  b2  c2
    step 1    a0 ->           b1 ->           c2 ->            to the next rank, which adds it to its own part
              a0  b0  c02     a01 b1  c1      a2  b12 c2
    step 2    c02 ->          a01 ->          b12 ->
              a0  B   c02     a01 b1  C       A   b12 c2       each rank has one part of the sum
    step 3    B ->            C ->            A ->             from here on parts are copied, not added
    step 4    A ->            B ->            C ->
    end       A   B   C       A   B   C       A   B   C

Each rank sends 2 (N - 1) / N of the tensor, whatever N is, in 2 (N - 1) steps: optimal for large tensors, but
slow for small ones, because each step costs a latency.
Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyrank.collectives.messages import Messages, Traffic

__all__ = ["ring_all_reduce", "ring_traffic"]


def ring_all_reduce(tensor: Tensor, messages: Messages) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks; any length, also fewer elements than ranks."""
    rank, size = messages.rank, messages.size
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    parts = tensor.tensor_split(size)  # if the length is not a multiple, the first parts are one element longer
    received = torch.empty_like(parts[0])
    for step in range(size - 1):
        outgoing, sums = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        messages.exchange(outgoing, next_rank, received[: len(sums)], previous_rank)
        sums += received[: len(sums)]
    for step in range(size - 1):  # this rank has the sum of part rank + 1
        outgoing, incoming = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        messages.exchange(outgoing, next_rank, incoming, previous_rank)


def ring_traffic(rank: int, size: int, length: int) -> Traffic:
    """Return the steps and the sent elements of one rank, by theory: all parts but one, twice."""
    if size == 1:
        return Traffic()
    lengths = [length // size + (index < length % size) for index in range(size)]
    return Traffic(2 * (size - 1), 2 * length - lengths[(rank + 1) % size] - lengths[(rank + 2) % size])
