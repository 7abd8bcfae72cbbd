"""Phases of a collective over shared memory: synchronises reads and writes of the ranks' buffers.

A collective consists of phases. In phase k a rank

    waits    until all others have begun phase k-1, and so have finished reading in phase k-2
    writes   into its buffer number k % 2
    signals  by setting its counter to k
    waits    until the ranks whose buffers it reads have set their counters to k, and reads

Two buffers and one counter for each rank are enough, and no rank waits only because another one still reads. Next to
its counter each rank writes an encoded call, so that a rank in a different collective is reported instead of read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps, Wait
from everyrank.backends.shm.calls import call_text
from everyrank.errors import RankFailedError

__all__ = ["LINE", "Phases"]

LINE = 8  # 8-byte words of a cache line: the counters of two ranks never share one
_GAVE_UP = 3  # index of the word that is set when an operation of the rank has failed
_MOST_KEPT = 256
_LOOKS = 40  # polls before a wait, for ranks that arrive some microseconds later


class Phases:
    """The buffers of a group, and the counters of its ranks.

    rank, size   in the group
    ranks        the number of each rank of the group among all ranks, for messages
    words        8-byte integers of the shared memory; from `first_word` on a line for each rank, with its counter, what
                 it calls in even and in odd phases, and whether it has given up
    buffers      [k % 2][rank], bytes, all of one length
    """

    def __init__(
        self, rank: int, size: int, ranks: Sequence[int], words: Any, first_word: int, buffers: list[list[Tensor]]
    ) -> None:
        self.rank, self.size, self.ranks, self.words, self.buffers = rank, size, ranks, words, buffers
        self.counters = [first_word + LINE * index for index in range(size)]
        self.others = [index for index in range(size) if index != rank]
        self.num_bytes = buffers[0][0].numel()
        self.phase = 0
        self.views: dict[torch.dtype, list[list[Tensor]]] = {}
        self.short: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}

    def give_up(self) -> None:
        """Tell the other ranks that an operation of this rank has failed, so that they stop waiting."""
        self.words[self.counters[self.rank] + _GAVE_UP] = 1

    def gave_up(self, rank: int) -> bool:
        """Return whether an operation of that rank has failed."""
        return bool(self.words[self.counters[rank] + _GAVE_UP])

    # Most waits have already ended, and a generator for each would take most of the time. So such a wait is an empty
    # tuple.

    def _begin(self, call: int) -> Wait:
        """Begin the next phase: wait until this rank may write into its buffer."""
        self.phase += 1
        if self._have_come(self.others, self.phase - 1):  # also ranks whose buffers are not read
            self.words[self.counters[self.rank] + 1 + self.phase % 2] = call
            return ()
        return self._begin_late(call)

    def _begin_late(self, call: int) -> Steps:
        yield from self._until(self.others, self.phase - 1)
        self.words[self.counters[self.rank] + 1 + self.phase % 2] = call

    def _signalled(self, sources: Sequence[int]) -> Wait:
        """Signal, and wait until `sources` have written. Raises `RankFailedError` if one calls another collective."""
        self.words[self.counters[self.rank]] = self.phase
        return () if self._have_come(sources, self.phase) else self._until(sources, self.phase)

    def _have_come(self, sources: Sequence[int], phase: int) -> bool:
        words, counters = self.words, self.counters
        for rank in sources:
            if words[counters[rank]] < phase:
                return False
        self._compare(sources, phase)
        return True

    def _until(self, sources: Sequence[int], phase: int) -> Steps:
        words, counters, looks = self.words, self.counters, 0
        missing = list(sources)
        while missing:
            looks += 1
            if looks > _LOOKS:
                yield missing
            missing[:] = [rank for rank in missing if words[counters[rank]] < phase]
        self._compare(sources, phase)

    def _compare(self, others: Sequence[int], phase: int) -> None:
        offset = 1 + phase % 2
        call = self.words[self.counters[self.rank] + offset]
        for rank in others:
            other = self.words[self.counters[rank] + offset]
            if other != call:
                raise RankFailedError(
                    f"rank {self.ranks[self.rank]} calls {call_text(call)}, rank {self.ranks[rank]} "
                    f"{call_text(other)}: all ranks of a group call the same collectives in the same order"
                )

    def _buffer(self, dtype: torch.dtype, phase: int) -> list[Tensor]:
        """Return all ranks' buffers of that phase, viewed as this dtype."""
        views = self.views.get(dtype)
        if views is None:
            views = [[buffer.view(dtype) for buffer in row] for row in self.buffers]
            self.views[dtype] = views
        return views[phase % 2]

    def _beginnings(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """Return the first `length` elements of each buffer of this phase, cached because lengths repeat."""
        views = self.short.get((dtype, length))
        if views is None:
            if len(self.short) >= _MOST_KEPT:
                self.short.clear()
            views = [[buffer[:length] for buffer in self._buffer(dtype, parity)] for parity in (0, 1)]
            self.short[dtype, length] = views
        return views[self.phase % 2]
