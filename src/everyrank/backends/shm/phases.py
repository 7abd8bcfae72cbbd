"""A phase of a collective over shared memory: who has come to it, and whose buffer may be read.

A collective is a row of phases. In phase k a rank

    waits    until all others have begun phase k-1, and so have read what they needed of phase k-2
    writes   into its buffer of buffer k % 2
    signals  by setting its counter to k
    waits    until those whose buffers it reads have set theirs to k, and reads

Two buffers and one counter for each rank are enough, and nobody waits only because another still reads. Beside its
counter each rank writes what it calls, so that one that calls something else is named instead of read.
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

LINE = 8  # 8-byte words that a processor moves at once: the counters of two ranks never share a line
_GAVE_UP = 3  # the word of a line that says that an operation of its rank has failed
_MOST_KEPT = 256
_LOOKS = 40  # for those that do the same as this rank, and come some microseconds later


class Phases:
    """The buffers of a group, and the counters of its ranks.

    rank, size   in the group
    ranks        the number of each rank of the group among all ranks, for messages
    words        8-byte integers of the shared memory; from `first_word` on a line for each rank, with its counter, what
                 it calls in even and in odd phases, and whether it has given up
    buffers        [buffer][rank], bytes, all of one length
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
        """Tell the others not to wait for this rank: an operation of it has failed."""
        self.words[self.counters[self.rank] + _GAVE_UP] = 1

    def gave_up(self, rank: int) -> bool:
        """Whether that rank will not come any more."""
        return bool(self.words[self.counters[rank] + _GAVE_UP])

    # Most ranks find the others there, and a generator for each wait would take longer than all else: so a wait that
    # has already ended is an empty tuple.

    def _begin(self, call: int) -> Wait:
        """Until this rank may write into its buffer of the next phase."""
        self.phase += 1
        if self._have_come(self.others, self.phase - 1):  # also those whose buffers nobody has read
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
        """The buffers of that phase, as elements of this dtype."""
        views = self.views.get(dtype)
        if views is None:
            views = [[buffer.view(dtype) for buffer in row] for row in self.buffers]
            self.views[dtype] = views
        return views[phase % 2]

    def _beginnings(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """So many elements of each buffer of this phase. A training asks for the same lengths in every step."""
        views = self.short.get((dtype, length))
        if views is None:
            if len(self.short) >= _MOST_KEPT:
                self.short.clear()
            views = [[buffer[:length] for buffer in self._buffer(dtype, parity)] for parity in (0, 1)]
            self.short[dtype, length] = views
        return views[self.phase % 2]
