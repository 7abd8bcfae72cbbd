"""Messages of one communicator. Each is in a queue of its own: MPI keeps them in order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from everyrank.backends.mpi.calls import Calls
from everyrank.backends.operation_queue import OperationQueue, Steps

__all__ = ["MpiMessages"]


class MpiMessages:
    """Of one communicator; `GroupMessages` of transport.py says what each does."""

    def __init__(self, calls: Calls, rank: int, size: int, ranks: Sequence[int], timeout_seconds: float) -> None:
        self.calls, self.mpi, self.communicator = calls, calls.mpi, calls.communicator
        self.rank, self.size, self.ranks, self.timeout_seconds = rank, size, ranks, timeout_seconds
        self.pending: dict[OperationQueue, None] = {}

    def queues(self) -> list[OperationQueue]:
        """Of all messages that may be pending."""
        return list(self.pending)

    def _new_queue(self) -> OperationQueue:
        queue = OperationQueue(self.ranks, self.timeout_seconds, is_message=True)
        self.pending[queue] = None
        return queue

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """As `GroupMessages` says."""
        queue = self._new_queue()
        return queue, self._send(queue, tensor, to, tag)

    def _send(self, queue: OperationQueue, tensor: Tensor, to: int, tag: int) -> Steps:
        try:
            request = self.communicator.Isend(self.calls.moved([tensor]), to, tag)
            yield from self.calls.until_done(request, [to], tensor)
        finally:
            del self.pending[queue]

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """As `GroupMessages` says."""
        queue = self._new_queue()
        return queue, self._receive(queue, tensor, source, tag)

    def _receive(self, queue: OperationQueue, tensor: Tensor, source: int | None, tag: int) -> Steps:
        status = self.mpi.Status()
        missing = [rank for rank in range(self.size) if rank != self.rank] if source is None else [source]
        mpi_source = self.mpi.ANY_SOURCE if source is None else source
        request = self.communicator.Irecv(self.calls.moved([tensor]), mpi_source, tag)
        try:
            yield from self.calls.until_done(request, missing, tensor, status)
        except GeneratorExit:
            request.Cancel()  # given up: the next message is for the next receive
            raise
        finally:
            del self.pending[queue]
        num_bytes, sender = status.Get_count(self.mpi.BYTE), status.Get_source()
        if num_bytes != tensor.nbytes:
            raise RuntimeError(
                f"recv: rank {self.ranks[sender]} sent {num_bytes} bytes with tag {tag}, and rank "
                f"{self.ranks[self.rank]} receives {tensor.nbytes}: the tensors of a send and its recv are alike"
            )
        return sender
