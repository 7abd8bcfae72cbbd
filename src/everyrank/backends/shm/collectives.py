"""Collectives over shared memory, in phases: each rank writes into a buffer of its own, and reads those of the others.

Tensors longer than a buffer go in parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps, no_steps
from everyrank.backends.shm.calls import encode_call
from everyrank.backends.shm.chunks import as_bytes, chunks_of, ranges_of, slices_of
from everyrank.backends.shm.phases import LINE, Phases
from everyrank.errors import RankFailedError

__all__ = ["SharedBuffers"]

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


class SharedBuffers(Phases):
    """The collectives over the buffers of a group (`GroupCollectives` says what each does)."""

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
        buffers = self._beginnings(tensor.dtype, tensor.numel())
        buffers[self.rank].copy_(tensor)
        yield from self._signalled(self.others)
        self._reduce(buffers, tensor, reduction)

    def _divided(self, tensor: Tensor, call: int, reduction: str) -> Steps:
        """Reduce-scatter, then all-gather; each rank hands in what others reduce, and gets what they have reduced."""
        for chunk in chunks_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            spans = slices_of(len(chunk), self.size)
            first, last = spans[self.rank].start, spans[self.rank].stop
            local_buffer = self._buffer(chunk.dtype, self.phase)[self.rank]
            local_buffer[:first].copy_(chunk[:first])
            local_buffer[last : len(chunk)].copy_(chunk[last:])
            yield from self._signalled(self.others)
            buffers = self._buffer(chunk.dtype, self.phase)
            mine = chunk[first:last]
            self._reduce([mine, *(buffers[rank][first:last] for rank in self.others)], mine, reduction)
            yield from self._begin(call)
            buffers = self._buffer(chunk.dtype, self.phase)
            buffers[self.rank][first:last].copy_(mine)
            yield from self._signalled(self.others)
            for rank in self.others:
                chunk[spans[rank]].copy_(buffers[rank][spans[rank]])

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
        for chunk in chunks_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            buffers = self._buffer(tensor.dtype, self.phase)
            if self.rank != root:
                buffers[self.rank][: len(chunk)].copy_(chunk)
                yield from self._signalled([])
            else:
                yield from self._signalled(self.others)
                self._reduce([chunk, *(buffers[rank][: len(chunk)] for rank in self.others)], chunk, reduction)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("broadcast", tensor.dtype, len(tensor), root=root)
        for chunk in chunks_of(as_bytes(tensor), self.num_bytes):
            yield from self._begin(call)
            buffer = self._buffer(torch.uint8, self.phase)[root][: len(chunk)]
            if self.rank == root:
                buffer.copy_(chunk)
                yield from self._signalled([])
            else:
                yield from self._signalled([root])
                chunk.copy_(buffer)

    def all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        """As `GroupCollectives` says."""
        return self._gather(encode_call("all_gather", sent.dtype, len(sent)), parts, sent)

    def gather(self, parts: list[Tensor], sent: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        return self._gather(encode_call("gather", sent.dtype, len(sent), root=root), parts, sent)

    def _gather(self, call: int, parts: list[Tensor], sent: Tensor) -> Steps:
        """`own` of each rank, on those that have `parts` for them."""
        for span in ranges_of(sent.nbytes, self.num_bytes):
            chunk = as_bytes(sent)[span]
            yield from self._begin(call)
            buffers = self._buffer(torch.uint8, self.phase)
            buffers[self.rank][: len(chunk)].copy_(chunk)
            yield from self._signalled(self.others if parts else [])
            for output, buffer in zip(parts, buffers, strict=False):
                as_bytes(output)[span].copy_(buffer[: len(chunk)])

    def scatter(self, received: Tensor, parts: list[Tensor], root: int) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("scatter", received.dtype, len(received), root=root)
        room = self._room()
        for span in ranges_of(received.nbytes, room):
            length = span.stop - span.start
            yield from self._begin(call)
            buffer = self._buffer(torch.uint8, self.phase)[root]
            if self.rank == root:
                for rank in range(self.size):
                    buffer[rank * room : rank * room + length].copy_(as_bytes(parts[rank])[span])
                yield from self._signalled([])
            else:
                yield from self._signalled([root])
            as_bytes(received)[span].copy_(buffer[self.rank * room : self.rank * room + length])

    def reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        call = encode_call("reduce_scatter", received.dtype, len(received), reduction)
        return self._reduce_scatter(received, parts, call, reduction)

    def _reduce_scatter(self, received: Tensor, parts: list[Tensor], call: int, reduction: str) -> Steps:
        if self.size == 1:
            received.copy_(parts[0])
            return
        room = self._room() // received.itemsize
        for span in ranges_of(len(received), room):
            length = span.stop - span.start
            yield from self._begin(call)
            buffers = self._buffer(received.dtype, self.phase)
            for rank in self.others:
                buffers[self.rank][rank * room : rank * room + length].copy_(parts[rank][span])
            yield from self._signalled(self.others)
            first = self.rank * room
            given = [parts[self.rank][span], *(buffers[rank][first : first + length] for rank in self.others)]
            self._reduce(given, received[span], reduction)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """As `GroupCollectives` says. A rank knows how long its own parts are: the first phase says so, too."""
        call = encode_call("all_to_all", (sent + received)[0].dtype, 0)
        head = -(-self.size // LINE) * LINE * 8  # bytes at the beginning of a buffer, for the lengths
        room = self._room(head)
        outgoing, incoming = [as_bytes(chunk) for chunk in sent], [as_bytes(chunk) for chunk in received]
        first, longest = 0, 1
        while first < longest:
            yield from self._begin(call)
            buffers = self._buffer(torch.uint8, self.phase)
            for rank in self.others:
                chunk, offset = outgoing[rank][first : first + room], head + rank * room
                buffers[self.rank][offset : offset + len(chunk)].copy_(chunk)
            if not first:
                self._beginnings(torch.int64, self.size)[self.rank].copy_(torch.tensor(list(map(len, outgoing))))
            yield from self._signalled(self.others)
            if not first:
                longest = self._longest(incoming)
                incoming[self.rank].copy_(outgoing[self.rank])
            for rank in self.others:
                chunk, offset = incoming[rank][first : first + room], head + self.rank * room
                chunk.copy_(buffers[rank][offset : offset + len(chunk)])
            first += room

    def _longest(self, incoming: list[Tensor]) -> int:
        """Bytes of the longest part that any rank sends. Raises `RankFailedError` for one that is not as expected."""
        lengths = [buffer.tolist() for buffer in self._beginnings(torch.int64, self.size)]
        for rank, chunk in enumerate(incoming):
            if lengths[rank][self.rank] != len(chunk):
                raise RankFailedError(
                    f"all_to_all: rank {self.ranks[rank]} sends {lengths[rank][self.rank]} bytes to rank "
                    f"{self.ranks[self.rank]}, which expects {len(chunk)}"
                )
        return max(map(max, lengths))

    def _room(self, head: int = 0) -> int:
        """Bytes of a buffer, behind its first ones, for each rank, so that any dtype fits without a remainder."""
        return (self.num_bytes - head) // self.size // 64 * 64
