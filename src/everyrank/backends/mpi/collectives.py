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

from everyrank.backends.lane import Steps
from everyrank.backends.mpi.calls import Calls, apart, hand_out, joined, room_for, widened
from everyrank.backends.mpi.whereabouts import Whereabouts
from everyrank.errors import RankFailedError

__all__ = ["MpiCollectives"]

_PIECE_BYTES = 2**20  # of an all-reduce
_MOST_PIECES = 32


class MpiCollectives:
    """Of one communicator; `GroupCollectives` of transport.py says what each does."""

    def __init__(self, calls: Calls, rank: int, size: int, whereabouts: Whereabouts) -> None:
        self.calls, self.mpi, self.communicator = calls, calls.mpi, calls.communicator
        self.rank, self.size, self.whereabouts = rank, size, whereabouts

    def _run(self, call: str, start: Callable[[], Any], *memory: Any) -> Steps:
        """Agree on the call, start it, ask until it is done."""
        yield from self._agree(call)
        yield from self._until_done(start(), *memory)

    def _agree(self, call: str) -> Steps:
        """Raises `RankFailedError` on all ranks where one of them calls something else."""
        self.whereabouts.begin(call)
        number = crc32(call.encode())
        least = array("q", [number, -number])
        request = self.communicator.Iallreduce(self.mpi.IN_PLACE, [least, self.mpi.INT64_T], self.mpi.MIN)
        yield from self._until_done(request, least)
        if least[0] != -least[1]:
            words = yield from self.whereabouts.difference()
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
        """In pieces that are under way together: on one host Open MPI is a third faster with them at 32 MiB."""
        length = max(_PIECE_BYTES // wide.itemsize, -(-len(wide) // _MOST_PIECES))
        requests = [
            self.communicator.Iallreduce(self.mpi.IN_PLACE, self.calls.reduced(piece), operation)
            for piece in wide.split(length)
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

    def all_gather(self, parts: list[Tensor], own: Tensor) -> Steps:
        """As `GroupCollectives` says."""
        whole = room_for(parts)
        given = apart(own, whole)
        memory = self.calls.moved([given]), self.calls.moved(whole)
        yield from self._run(_text("all_gather", own), lambda: self.communicator.Iallgather(*memory), given, whole)
        hand_out(whole, parts)

    def gather(self, parts: list[Tensor], own: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        whole = room_for(parts)
        given = apart(own, whole)
        memory = self.calls.moved([given]), self.calls.moved(whole) if self.rank == root else None
        call = _text("gather", own, root=root)
        yield from self._run(call, lambda: self.communicator.Igather(*memory, root), given, whole)
        hand_out(whole, parts)

    def scatter(self, own: Tensor, parts: list[Tensor], root: int) -> Steps:
        """As `GroupCollectives` says."""
        whole = joined(parts, [own])
        memory = self.calls.moved(whole) if self.rank == root else None, self.calls.moved([own])
        call = _text("scatter", own, root=root)
        yield from self._run(call, lambda: self.communicator.Iscatter(*memory, root), own, whole)

    def reduce_scatter(self, own: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        return self._reduce_scatter(own, parts, reduction, self.calls.operation(reduction, own.dtype))

    def _reduce_scatter(self, own: Tensor, parts: list[Tensor], reduction: str, operation: Any) -> Steps:
        wide = widened(own)
        given = torch.cat([part.to(wide.dtype) for part in parts])
        memory = self.calls.reduced(given), self.calls.reduced(wide)
        yield from self._run(
            _text("reduce_scatter", own, reduction),
            lambda: self.communicator.Ireduce_scatter_block(*memory, operation),
            given,
            wide,
        )
        self._put(wide, own, reduction)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """As `GroupCollectives` says. How long each part is goes first: MPI does not say that one was shorter."""
        lengths = torch.tensor([part.nbytes for part in sent])
        found = torch.empty_like(lengths)
        memory = self.calls.moved([lengths]), self.calls.moved([found])
        call = f"all_to_all({str(sent[0].dtype).removeprefix('torch.')})"
        yield from self._run(call, lambda: self.communicator.Ialltoall(*memory), lengths, found)
        for rank, num_bytes in enumerate(found.tolist()):
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
        return [memory, [part.numel() for part in parts], None, kind]


def _text(operation: str, tensor: Tensor, reduction: str = "", root: int | None = None) -> str:
    words = [f"{len(tensor)} elements of {str(tensor.dtype).removeprefix('torch.')}"]
    words += [reduction] if reduction else []
    words += [f"root {root}"] if root is not None else []
    return f"{operation}({', '.join(words)})"
