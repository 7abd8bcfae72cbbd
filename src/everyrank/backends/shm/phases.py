"""Phases of a collective over shared memory: synchronises reads and writes of the ranks' buffers.

A collective consists of phases. In phase k a rank

    waits    until all others have signalled in phase k-1, and so have finished reading in phase k-2
    writes   into its buffer number k % 2
    signals  by setting its counter to k
    waits    until the ranks whose buffers it reads have set their counters to k, and reads

Two buffers and one counter for each rank are enough, and no rank waits only because another one still reads. Next to
its counter each rank writes its encoded call, so that a rank in a different collective is reported instead of read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps, Wait
from everyrank.backends.shm.calls import decode_call
from everyrank.errors import RankFailedError

__all__ = ["LINE_WORDS", "Phases"]

LINE_WORDS = 8  # 8-byte words of a cache line: the counters of two ranks never share one
_FAILED_INDEX = 3  # index, in a rank's line, of the word that is set when an operation of the rank has failed
_MAX_CACHED_VIEWS = 256
_MAX_POLLS = 40  # a wait polls this often before it yields, for ranks that arrive some microseconds later


class Phases:
    """The buffers of a group, and the counters of its ranks.

    rank, size    in the group
    ranks         the global rank of each rank of the group, for messages
    words         8-byte integers in shared memory. From `first_word` on, each rank has a cache line: its counter, its
                  call in even phases, its call in odd phases, and whether it has failed
    buffers       [k % 2][rank], bytes, all of one length
    num_bytes     length of a buffer
    phase         number of the current phase, k
    dtype_views   the buffers viewed as other dtypes
    prefix_views  the first elements of the buffers, for (dtype, length)
    """

    def __init__(
        self, rank: int, size: int, ranks: Sequence[int], words: Any, first_word: int, buffers: list[list[Tensor]]
    ) -> None:
        self.rank, self.size, self.ranks, self.words, self.buffers = rank, size, ranks, words, buffers
        self.counters = [first_word + LINE_WORDS * index for index in range(size)]
        self.other_ranks = [index for index in range(size) if index != rank]
        self.num_bytes = buffers[0][0].numel()
        self.phase = 0
        self.dtype_views: dict[torch.dtype, list[list[Tensor]]] = {}
        self.prefix_views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}

    def set_failed(self) -> None:
        """Tell the other ranks that an operation of this rank has failed, so that they stop waiting."""
        self.words[self.counters[self.rank] + _FAILED_INDEX] = 1

    def has_failed(self, rank: int) -> bool:
        """Return whether an operation of that rank has failed."""
        return bool(self.words[self.counters[rank] + _FAILED_INDEX])

    # Most waits are over before they begin. For those, return an empty tuple, because creating a generator is slow.

    def _begin(self, call: int) -> Wait:
        """Begin the next phase: wait until this rank may write into its buffer."""
        self.phase += 1
        if self._have_reached(self.other_ranks, self.phase - 1):  # including ranks whose buffers are not read
            self.words[self.counters[self.rank] + 1 + self.phase % 2] = call
            return ()
        return self._begin_after_wait(call)

    def _begin_after_wait(self, call: int) -> Steps:
        yield from self._wait_for(self.other_ranks, self.phase - 1)
        self.words[self.counters[self.rank] + 1 + self.phase % 2] = call

    def _signal_and_wait(self, sources: Sequence[int]) -> Wait:
        """Signal that this rank has written, and wait until `sources` have, too.

        Raises `RankFailedError` if one of them calls a different collective.
        """
        self.words[self.counters[self.rank]] = self.phase
        return () if self._have_reached(sources, self.phase) else self._wait_for(sources, self.phase)

    def _have_reached(self, sources: Sequence[int], phase: int) -> bool:
        """Return whether all of these ranks have signalled in this phase. Raises `RankFailedError` for other calls."""
        words, counters = self.words, self.counters
        for rank in sources:
            if words[counters[rank]] < phase:
                return False
        self._compare_calls(sources, phase)
        return True

    def _wait_for(self, sources: Sequence[int], phase: int) -> Steps:
        words, counters, num_polls = self.words, self.counters, 0
        missing = list(sources)
        while missing:
            num_polls += 1
            if num_polls > _MAX_POLLS:
                yield missing
            missing[:] = [rank for rank in missing if words[counters[rank]] < phase]
        self._compare_calls(sources, phase)

    def _compare_calls(self, sources: Sequence[int], phase: int) -> None:
        """Raise `RankFailedError` if one of these ranks makes a different call in this phase."""
        offset = 1 + phase % 2
        call = self.words[self.counters[self.rank] + offset]
        for rank in sources:
            other_call = self.words[self.counters[rank] + offset]
            if other_call != call:
                raise RankFailedError(
                    f"rank {self.ranks[self.rank]} calls {decode_call(call)}, but rank {self.ranks[rank]} "
                    f"calls {decode_call(other_call)}: all ranks of a group call the same collectives in the same order"
                )

    def _phase_buffers(self, dtype: torch.dtype, phase: int) -> list[Tensor]:
        """Return all ranks' buffers of that phase, viewed as this dtype."""
        views = self.dtype_views.get(dtype)
        if views is None:
            views = [[buffer.view(dtype) for buffer in row] for row in self.buffers]
            self.dtype_views[dtype] = views
        return views[phase % 2]

    def _prefixes(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """Return the first `length` elements of each buffer of this phase, cached because lengths repeat."""
        views = self.prefix_views.get((dtype, length))
        if views is None:
            if len(self.prefix_views) >= _MAX_CACHED_VIEWS:
                self.prefix_views.clear()
            views = [[buffer[:length] for buffer in self._phase_buffers(dtype, parity)] for parity in (0, 1)]
            self.prefix_views[dtype, length] = views
        return views[self.phase % 2]
