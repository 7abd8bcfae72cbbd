"""All-reduce by recursive halving and doubling: the same traffic as the ring, in 2 log2 N steps.

Ranks whose numbers differ in one bit exchange halves, starting with the highest bit: each keeps one half and adds the
half that it receives. After log2 N steps a rank has 1/N of the sum. Then the same pairs exchange their parts of the
sum in reverse order. Four ranks, parts a b c d:

               rank 0         rank 1         rank 2         rank 3
    0-2, 1-3   keeps ab       keeps ab       keeps cd       keeps cd       each sends half the tensor
    0-1, 2-3   a              b              c              d              a quarter
    0-1, 2-3   ab             ab             cd             cd             back: a quarter
    0-2, 1-3   abcd           abcd           abcd           abcd           half

If N is not a power of two, the surplus ranks first send their whole tensor to a neighbour and receive the sum at the
end. They and their neighbours send the whole tensor once more.
Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyrank.collectives.messages import Messages, Traffic

__all__ = ["halving_all_reduce", "halving_traffic"]


def halving_all_reduce(tensor: Tensor, messages: Messages) -> None:
    """Replace `tensor`, shape (length,), by its sum over the ranks; any length, any number of ranks."""
    power = 1 << (messages.size.bit_length() - 1)
    num_extra = messages.size - power
    has_partner = messages.rank < 2 * num_extra
    received = torch.empty_like(tensor)
    if has_partner and messages.rank % 2 == 0:
        messages.send(tensor, messages.rank + 1)
        messages.receive(tensor, messages.rank + 1)
        return
    if has_partner:
        messages.receive(received, messages.rank - 1)
        tensor += received
    # number of this rank among the active ranks: 0 to power - 1
    number = messages.rank // 2 if has_partner else messages.rank - num_extra
    low, high, distance = 0, len(tensor), power // 2
    earlier_ranges: list[tuple[int, int, int]] = []
    while distance:
        peer = _rank_of(number ^ distance, num_extra)
        middle = (low + high) // 2
        kept_range, sent_range = (
            ((middle, high), (low, middle)) if number & distance else ((low, middle), (middle, high))
        )
        earlier_ranges.append((low, high, peer))
        messages.exchange(tensor[slice(*sent_range)], peer, received[slice(*kept_range)], peer)
        tensor[slice(*kept_range)] += received[slice(*kept_range)]
        (low, high), distance = kept_range, distance // 2
    for whole_low, whole_high, peer in reversed(earlier_ranges):
        peer_part = tensor[whole_low:low] if low > whole_low else tensor[high:whole_high]
        messages.exchange(tensor[low:high], peer, peer_part, peer)
        low, high = whole_low, whole_high
    if has_partner:
        messages.send(tensor, messages.rank - 1)


def _rank_of(number: int, num_extra: int) -> int:
    return 2 * number + 1 if number < num_extra else number + num_extra


def halving_traffic(rank: int, size: int, length: int) -> Traffic:
    """Return the steps and the sent elements of one rank, by the theory of the algorithm."""
    power = 1 << (size.bit_length() - 1)
    num_extra = size - power
    has_partner = rank < 2 * num_extra
    if has_partner and rank % 2 == 0:
        return Traffic(2, length)
    number = rank // 2 if has_partner else rank - num_extra
    num_kept, num_elements, num_steps, distance = length, 0, 0, power // 2
    while distance:
        upper = num_kept - num_kept // 2
        next_kept = upper if number & distance else num_kept // 2
        num_elements += (num_kept - next_kept) + next_kept  # sent while halving, and while doubling
        num_kept, num_steps, distance = next_kept, num_steps + 2, distance // 2
    return Traffic(num_steps + 2 * has_partner, num_elements + length * has_partner)
