"""Collectives over shared memory, in phases: each rank writes into a slot of its own, and reads those of the others.

Tensors longer than a slot go in parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everyrank.backends.lane import Steps, no_steps
from everyrank.backends.shm.calls import encode_call
from everyrank.backends.shm.phases import LINE, Phases
from everyrank.backends.shm.pieces import as_bytes, pieces_of, ranges_of, spans_of
from everyrank.errors import RankFailedError

__all__ = ["Slots"]

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


class Slots(Phases):
    """The collectives over the slots of a group (`GroupCollectives` says what each does)."""

    def barrier(self) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("barrier", torch.uint8, 0)
        yield from self._begin(call)
        yield from self._signalled(self.others)

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """As `GroupCollectives` says. Short tensors are reduced by every rank, long ones by each rank a part."""
        call = encode_call("all_reduce", tensor.dtype, tensor.numel(), reduction)
        if self.size == 1:
            return no_steps()
        is_short = tensor.nbytes * self.size < _LEAST_DIVIDED_BYTES
        return self._whole(tensor, call, reduction) if is_short else self._divided(tensor, call, reduction)

    def _whole(self, tensor: Tensor, call: int, reduction: str) -> Steps:
        yield from self._begin(call)
        slots = self._beginnings(tensor.dtype, tensor.numel())
        slots[self.rank].copy_(tensor)
        yield from self._signalled(self.others)
        self._reduce(slots, tensor, reduction)

    def _divided(self, tensor: Tensor, call: int, reduction: str) -> Steps:
        """Reduce-scatter, then all-gather; each rank hands in what others reduce, and gets what they have reduced."""
        for part in pieces_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
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
        function, first = _REDUCE[reduction], given[0]
        for tensor in given[1:]:
            first = function(first, tensor, out=out)
        if reduction == "avg":
            out.div_(self.size)

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("reduce", tensor.dtype, len(tensor), reduction, root)
        return self._reduce_to(tensor, call, reduction, root)

    def _reduce_to(self, tensor: Tensor, call: int, reduction: str, root: int) -> Steps:
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
        call = encode_call("reduce_scatter", own.dtype, len(own), reduction)
        return self._reduce_scatter(own, parts, call, reduction)

    def _reduce_scatter(self, own: Tensor, parts: list[Tensor], call: int, reduction: str) -> Steps:
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
