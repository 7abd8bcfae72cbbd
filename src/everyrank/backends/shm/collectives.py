"""Collectives over shared memory: each rank writes into a slot of its own, says so, and reads the slots of the others.

A collective is a row of phases. In phase k a rank

    waits    until all others have begun phase k-1, and so have read what they needed of phase k-2
    writes   into its slot of buffer k % 2
    signals  by setting its counter to k
    waits    until those whose slots it reads have set theirs to k, and reads

Two buffers and one counter for each rank are enough, and nobody waits only because another still reads. Tensors longer
than a slot go in parts. Beside its counter each rank writes what it calls, so that one that calls something else is
named instead of read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.lane import Steps
from everyrank.backends.shm.calls import call_text, check_reduction, encode_call
from everyrank.backends.shm.pieces import as_bytes, pieces_of, ranges_of, spans_of
from everyrank.errors import RankFailedError

__all__ = ["LINE", "Slots"]

LINE = 8  # 8-byte words that a processor moves at once: the counters of two ranks never share a line
_GAVE_UP = 3  # the word of a line that says that an operation of its rank has failed
_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_LEAST_DIVIDED_BYTES = 2**18  # of all ranks together; below, each reduces everything: cheaper than a second phase
_MOST_KEPT = 256
_LOOKS = 10  # for those that do the same as this rank, and come a microsecond later


class Slots:
    """The slots of a group, and the collectives over them (`GroupCollectives` says what each does).

    rank, size   in the group
    ranks        the number of each rank of the group among all ranks, for messages
    words        8-byte integers of the shared memory; from `first_word` on a line for each rank, with its counter, what
                 it calls in even and in odd phases, and whether it has given up
    slots        [buffer][rank], bytes, all of one length
    """

    def __init__(
        self, rank: int, size: int, ranks: Sequence[int], words: Any, first_word: int, slots: list[list[Tensor]]
    ) -> None:
        self.rank, self.size, self.ranks, self.words, self.slots = rank, size, ranks, words, slots
        self.counters = [first_word + LINE * one for one in range(size)]
        self.others = [one for one in range(size) if one != rank]
        self.num_bytes = slots[0][0].numel()
        self.phase = 0
        self.views: dict[torch.dtype, list[list[Tensor]]] = {}
        self.short: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}

    def give_up(self) -> None:
        """Tell the others not to wait for this rank: an operation of it has failed."""
        self.words[self.counters[self.rank] + _GAVE_UP] = 1

    def gave_up(self, rank: int) -> bool:
        """Whether that rank will not come any more."""
        return bool(self.words[self.counters[rank] + _GAVE_UP])

    # one phase

    def _begin(self, call: int) -> Steps:
        """Until this rank may write into its slot of the next phase."""
        self.phase += 1
        yield from self._until(self.others, self.phase - 1)
        if self.phase > 1:  # also of those whose slots nobody has read
            self._compare(self.others, self.phase - 1)
        self.words[self.counters[self.rank] + 1 + self.phase % 2] = call

    def _until(self, sources: Sequence[int], phase: int) -> Steps:
        words, counters, looks = self.words, self.counters, 0
        missing = [rank for rank in sources if words[counters[rank]] < phase]
        while missing:
            looks += 1
            if looks > _LOOKS:
                yield missing
            missing[:] = [rank for rank in missing if words[counters[rank]] < phase]

    def _signalled(self, sources: Sequence[int]) -> Steps:
        """Signal, and wait until those whose slots are read have written. Raises `RankFailedError` for another call."""
        self.words[self.counters[self.rank]] = self.phase
        yield from self._until(sources, self.phase)
        self._compare(sources, self.phase)

    def _compare(self, others: Sequence[int], phase: int) -> None:
        place = 1 + phase % 2
        call = self.words[self.counters[self.rank] + place]
        for rank in others:
            other = self.words[self.counters[rank] + place]
            if other != call:
                raise RankFailedError(
                    f"rank {self.ranks[self.rank]} calls {call_text(call)}, rank {self.ranks[rank]} "
                    f"{call_text(other)}: all ranks of a group call the same collectives in the same order"
                )

    def _buffer(self, dtype: torch.dtype, phase: int) -> list[Tensor]:
        """The slots of that phase, as elements of this dtype."""
        views = self.views.get(dtype)
        if views is None:
            views = [[slot.view(dtype) for slot in row] for row in self.slots]
            self.views[dtype] = views
        return views[phase % 2]

    def _beginnings(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """So many elements of each slot of this phase. A training asks for the same lengths in every step."""
        views = self.short.get((dtype, length))
        if views is None:
            if len(self.short) >= _MOST_KEPT:
                self.short.clear()
            views = [[slot[:length] for slot in self._buffer(dtype, parity)] for parity in (0, 1)]
            self.short[dtype, length] = views
        return views[self.phase % 2]

    # collectives

    def barrier(self) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("barrier", torch.uint8, 0)
        yield from self._begin(call)
        yield from self._signalled(self.others)

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """As `GroupCollectives` says. Short tensors are reduced by every rank, long ones by each rank a part."""
        check_reduction(reduction, tensor.dtype)
        return self._all_reduce(tensor, reduction)

    def _all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        call = encode_call("all_reduce", tensor.dtype, tensor.numel(), reduction)
        if self.size == 1:
            return
        for part in pieces_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            if part.nbytes * self.size < _LEAST_DIVIDED_BYTES:
                slots = self._beginnings(part.dtype, part.numel())
                slots[self.rank].copy_(part)
                yield from self._signalled(self.others)
                self._reduce(slots, part, reduction)
            else:
                yield from self._divided(part, call, reduction)

    def _divided(self, part: Tensor, call: int, reduction: str) -> Steps:
        """Reduce-scatter, then all-gather; each rank hands in what others reduce, and gets what they have reduced."""
        spans = spans_of(len(part), self.size)
        first, last = spans[self.rank].start, spans[self.rank].stop
        own = self._buffer(part.dtype, self.phase)[self.rank]
        own[:first].copy_(part[:first])
        own[last : len(part)].copy_(part[last:])
        yield from self._signalled(self.others)
        slots = self._buffer(part.dtype, self.phase)
        mine = part[first:last]
        self._reduce([mine, *(slots[rank][first:last] for rank in self.others)], mine, reduction)
        yield from self._begin(call)
        slots = self._buffer(part.dtype, self.phase)
        slots[self.rank][first:last].copy_(mine)
        yield from self._signalled(self.others)
        for rank in self.others:
            part[spans[rank]].copy_(slots[rank][spans[rank]])

    def _reduce(self, given: list[Tensor], out: Tensor, reduction: str) -> None:
        """In the order given. `out` may be the first of them."""
        function = _REDUCE[reduction]
        function(given[0], given[1], out=out)
        for tensor in given[2:]:
            function(out, tensor, out=out)
        if reduction == "avg":
            out.div_(self.size)

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """As `GroupCollectives` says."""
        check_reduction(reduction, tensor.dtype)
        return self._reduce_to(tensor, reduction, root)

    def _reduce_to(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        call = encode_call("reduce", tensor.dtype, len(tensor), reduction, root)
        if self.size == 1:
            return
        for part in pieces_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            slots = self._buffer(tensor.dtype, self.phase)
            if self.rank != root:
                slots[self.rank][: len(part)].copy_(part)
                yield from self._signalled([])
            else:
                yield from self._signalled(self.others)
                self._reduce([part, *(slots[rank][: len(part)] for rank in self.others)], part, reduction)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("broadcast", tensor.dtype, len(tensor), root=root)
        for part in pieces_of(as_bytes(tensor), self.num_bytes):
            yield from self._begin(call)
            slot = self._buffer(torch.uint8, self.phase)[root][: len(part)]
            if self.rank == root:
                slot.copy_(part)
                yield from self._signalled([])
            else:
                yield from self._signalled([root])
                part.copy_(slot)

    def all_gather(self, parts: list[Tensor], own: Tensor) -> Steps:
        """As `GroupCollectives` says."""
        return self._gather(encode_call("all_gather", own.dtype, len(own)), parts, own)

    def gather(self, parts: list[Tensor], own: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        return self._gather(encode_call("gather", own.dtype, len(own), root=root), parts, own)

    def _gather(self, call: int, parts: list[Tensor], own: Tensor) -> Steps:
        """`own` of each rank, on those that have `parts` for them."""
        for span in ranges_of(own.nbytes, self.num_bytes):
            piece = as_bytes(own)[span]
            yield from self._begin(call)
            slots = self._buffer(torch.uint8, self.phase)
            slots[self.rank][: len(piece)].copy_(piece)
            yield from self._signalled(self.others if parts else [])
            for part, slot in zip(parts, slots, strict=False):
                as_bytes(part)[span].copy_(slot[: len(piece)])

    def scatter(self, own: Tensor, parts: list[Tensor], root: int) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("scatter", own.dtype, len(own), root=root)
        room = self._room()
        for span in ranges_of(own.nbytes, room):
            length = span.stop - span.start
            yield from self._begin(call)
            slot = self._buffer(torch.uint8, self.phase)[root]
            if self.rank == root:
                for rank in range(self.size):
                    slot[rank * room : rank * room + length].copy_(as_bytes(parts[rank])[span])
                yield from self._signalled([])
            else:
                yield from self._signalled([root])
            as_bytes(own)[span].copy_(slot[self.rank * room : self.rank * room + length])

    def reduce_scatter(self, own: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        check_reduction(reduction, own.dtype)
        return self._reduce_scatter(own, parts, reduction)

    def _reduce_scatter(self, own: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        call = encode_call("reduce_scatter", own.dtype, len(own), reduction)
        if self.size == 1:
            own.copy_(parts[0])
            return
        room = self._room() // own.itemsize
        for span in ranges_of(len(own), room):
            length = span.stop - span.start
            yield from self._begin(call)
            slots = self._buffer(own.dtype, self.phase)
            for rank in self.others:
                slots[self.rank][rank * room : rank * room + length].copy_(parts[rank][span])
            yield from self._signalled(self.others)
            first = self.rank * room
            given = [parts[self.rank][span], *(slots[rank][first : first + length] for rank in self.others)]
            self._reduce(given, own[span], reduction)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """As `GroupCollectives` says. A rank knows how long its own parts are: the first phase says so, too."""
        call = encode_call("all_to_all", (sent + received)[0].dtype, 0)
        head = -(-self.size // LINE) * LINE * 8  # bytes at the beginning of a slot, for the lengths
        room = self._room(head)
        outgoing, incoming = [as_bytes(part) for part in sent], [as_bytes(part) for part in received]
        first, longest = 0, 1
        while first < longest:
            yield from self._begin(call)
            slots = self._buffer(torch.uint8, self.phase)
            for rank in self.others:
                piece, place = outgoing[rank][first : first + room], head + rank * room
                slots[self.rank][place : place + len(piece)].copy_(piece)
            if not first:
                self._beginnings(torch.int64, self.size)[self.rank].copy_(torch.tensor(list(map(len, outgoing))))
            yield from self._signalled(self.others)
            if not first:
                longest = self._longest(incoming)
                incoming[self.rank].copy_(outgoing[self.rank])
            for rank in self.others:
                piece, place = incoming[rank][first : first + room], head + self.rank * room
                piece.copy_(slots[rank][place : place + len(piece)])
            first += room

    def _longest(self, incoming: list[Tensor]) -> int:
        """Bytes of the longest part that any rank sends. Raises `RankFailedError` for one that is not as expected."""
        lengths = [slot.tolist() for slot in self._beginnings(torch.int64, self.size)]
        for rank, part in enumerate(incoming):
            if lengths[rank][self.rank] != len(part):
                raise RankFailedError(
                    f"all_to_all: rank {self.ranks[rank]} sends {lengths[rank][self.rank]} bytes to rank "
                    f"{self.ranks[self.rank]}, which expects {len(part)}"
                )
        return max(map(max, lengths))

    def _room(self, head: int = 0) -> int:
        """Bytes of a slot, behind its first ones, for each rank, so that any dtype fits without a remainder."""
        return (self.num_bytes - head) // self.size // 64 * 64
