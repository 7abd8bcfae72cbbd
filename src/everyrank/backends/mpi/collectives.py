"""Collectives of one communicator.

MPI trusts its callers: ranks that call different collectives, or one with other lengths, get wrong numbers, crash or
wait for ever. So ranks agree first, in a reduction of two numbers, what they all call.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from everyrank.backends.mpi.calls import Calls, apart, hand_out, joined, room_for, widened
from everyrank.backends.mpi.wait_table import WaitTable
from everyrank.backends.operation_queue import Steps
from everyrank.errors import RankFailedError

__all__ = ["MpiCollectives"]

_PIECE_BYTES = 2**20  # of an all-reduce
_MOST_PIECES = 32


class MpiCollectives:
    """Of one communicator; `GroupCollectives` of transport.py says what each does."""

    def __init__(self, calls: Calls, rank: int, size: int, wait_table: WaitTable) -> None:
        self.calls, self.mpi, self.communicator = calls, calls.mpi, calls.communicator
        self.rank, self.size, self.wait_table = rank, size, wait_table

    def _run(self, call: str, start: Callable[[], Any], *memory: Any) -> Steps:
        """Agree on the call, start it, ask until it is done."""
        yield from self._agree(call)
        yield from self._until_done(start(), *memory)

    def _agree(self, call: str) -> Steps:
        """Raises `RankFailedError` on all ranks where one of them calls something else."""
        self.wait_table.begin(call)
        number = crc32(call.encode())
        least = array("q", [number, -number])
        request = self.communicator.Iallreduce(self.mpi.IN_PLACE, [least, self.mpi.INT64_T], self.mpi.MIN)
        yield from self._until_done(request, least)
        if least[0] != -least[1]:
            words = yield from self.wait_table.difference()
            raise RankFailedError(f"{words}: all ranks of a group call the same collectives in the same order")

    def _until_done(self, request: Any, *memory: Any) -> Steps:
        return self.calls.until_done(request, [rank for rank in range(self.size) if rank != self.rank], memory)

    def barrier(self) -> Steps:
        """As `GroupCollectives` says."""
        yield from self._agree("barrier")  # nobody leaves before all have come

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        return self._all_reduce(tensor, reduction, self.calls.operation(reduction, tensor.dtype))

    def _all_reduce(self, tensor: Tensor, reduction: str, operation: Any) -> Steps:
        yield from self._agree(_text("all_reduce", tensor, reduction))
        wide = widened(tensor)
        yield from self._added_up(wide, operation)
        self._put(wide, tensor, reduction)

    def _added_up(self, wide: Tensor, operation: Any) -> Steps:
        """In chunks that are under way together: on one host Open MPI is a third faster with them at 32 MiB."""
        length = max(_PIECE_BYTES // wide.itemsize, -(-len(wide) // _MOST_PIECES))
        requests = [
            self.communicator.Iallreduce(self.mpi.IN_PLACE, self.calls.reduced(chunk), operation)
            for chunk in wide.split(length)
        ]
        for request in requests:
            yield from self._until_done(request, wide)

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """As `GroupCollectives` says. By all-reduce, which is given a copy where `tensor` has to stay.

        Open MPI's Ireduce goes in segments of some KiB, each as late as somebody asks how far it is: ten seconds for
        64 MiB, where an all-reduce takes 40 ms.
        """
        return self._reduce(tensor, reduction, root, self.calls.operation(reduction, tensor.dtype))

    def _reduce(self, tensor: Tensor, reduction: str, root: int, operation: Any) -> Steps:
        yield from self._agree(_text("reduce", tensor, reduction, root))
        wide = widened(tensor)
        if wide is tensor and self.rank != root:
            wide = tensor.clone()
        yield from self._added_up(wide, operation)
        if self.rank == root:
            self._put(wide, tensor, reduction)

    def _put(self, wide: Tensor, tensor: Tensor, reduction: str) -> None:
        if reduction == "avg":
            wide.div_(self.size)
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        memory = self.calls.moved([tensor])
        yield from self._run(
            _text("broadcast", tensor, root=root), lambda: self.communicator.Ibcast(memory, root), tensor
        )

    def all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        """As `GroupCollectives` says."""
        whole = room_for(parts)
        given = apart(sent, whole)
        memory = self.calls.moved([given]), self.calls.moved(whole)
        yield from self._run(_text("all_gather", sent), lambda: self.communicator.Iallgather(*memory), given, whole)
        hand_out(whole, parts)

    def gather(self, parts: list[Tensor], sent: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        whole = room_for(parts)
        given = apart(sent, whole)
        memory = self.calls.moved([given]), self.calls.moved(whole) if self.rank == root else None
        call = _text("gather", sent, root=root)
        yield from self._run(call, lambda: self.communicator.Igather(*memory, root), given, whole)
        hand_out(whole, parts)

    def scatter(self, received: Tensor, parts: list[Tensor], root: int) -> Steps:
        """As `GroupCollectives` says."""
        whole = joined(parts, [received])
        memory = self.calls.moved(whole) if self.rank == root else None, self.calls.moved([received])
        call = _text("scatter", received, root=root)
        yield from self._run(call, lambda: self.communicator.Iscatter(*memory, root), received, whole)

    def reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        return self._reduce_scatter(received, parts, reduction, self.calls.operation(reduction, received.dtype))

    def _reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str, operation: Any) -> Steps:
        wide = widened(received)
        given = torch.cat([chunk.to(wide.dtype) for chunk in parts])
        memory = self.calls.reduced(given), self.calls.reduced(wide)
        yield from self._run(
            _text("reduce_scatter", received, reduction),
            lambda: self.communicator.Ireduce_scatter_block(*memory, operation),
            given,
            wide,
        )
        self._put(wide, received, reduction)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """As `GroupCollectives` says. How long each part is goes first: MPI does not say that one was shorter."""
        lengths = torch.tensor([chunk.nbytes for chunk in sent])
        incoming_lengths = torch.empty_like(lengths)
        memory = self.calls.moved([lengths]), self.calls.moved([incoming_lengths])
        call = f"all_to_all({str(sent[0].dtype).removeprefix('torch.')})"
        yield from self._run(call, lambda: self.communicator.Ialltoall(*memory), lengths, incoming_lengths)
        for rank, num_bytes in enumerate(incoming_lengths.tolist()):
            if num_bytes != received[rank].nbytes:
                raise RuntimeError(
                    f"all_to_all: rank {rank} of the group sends {num_bytes} bytes to rank {self.rank}, which expects "
                    f"{received[rank].nbytes}"
                )
        given, taken = joined(sent, received), room_for(received)
        request = self.communicator.Ialltoallv(self._uneven(given, sent), self._uneven(taken, received))
        yield from self._until_done(request, given, taken)
        hand_out(taken, received)

    def _uneven(self, whole: list[Tensor], parts: list[Tensor]) -> list[Any]:
        memory, kind = self.calls.moved(whole)
        return [memory, [chunk.numel() for chunk in parts], None, kind]


def _text(operation: str, tensor: Tensor, reduction: str = "", root: int | None = None) -> str:
    words = [f"{len(tensor)} elements of {str(tensor.dtype).removeprefix('torch.')}"]
    words += [reduction] if reduction else []
    words += [f"root {root}"] if root is not None else []
    return f"{operation}({', '.join(words)})"
