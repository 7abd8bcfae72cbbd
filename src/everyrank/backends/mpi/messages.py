"""Send and receive of one communicator. Each message has its own queue, because MPI keeps messages in order."""

from __future__ import annotations

from torch import Tensor

from everyrank.backends.mpi.calls import Calls
from everyrank.backends.operation_queue import OperationQueue, Steps

__all__ = ["MpiMessages"]


class MpiMessages:
    """Implements `GroupMessages` for one communicator.

    collective_queue   the queue of collectives, which has the current timeout of the group
    pending_queues     the queue of each pending message
    """

    def __init__(self, calls: Calls, rank: int, size: int, collective_queue: OperationQueue) -> None:
        self.calls, self.mpi, self.communicator = calls, calls.mpi, calls.communicator
        self.rank, self.size, self.ranks, self.collective_queue = rank, size, collective_queue.ranks, collective_queue
        self.pending_queues: dict[OperationQueue, None] = {}

    def queues(self) -> list[OperationQueue]:
        """Return the queues of all messages that may be pending."""
        return list(self.pending_queues)

    def _new_queue(self) -> OperationQueue:
        queue = OperationQueue(self.ranks, self.collective_queue.timeout_seconds, is_message=True)
        self.pending_queues[queue] = None
        return queue

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """Send `tensor` to rank `to`; return the queue of the message and its steps."""
        queue = self._new_queue()
        return queue, self._send(queue, tensor, to, tag)

    def _send(self, queue: OperationQueue, tensor: Tensor, to: int, tag: int) -> Steps:
        try:
            request = self.communicator.Isend(self.calls.byte_buffer([tensor]), to, tag)
            yield from self.calls.until_done(request, [to], tensor)
        finally:
            del self.pending_queues[queue]

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """Receive into `tensor` from `source`, or from any rank (None); return the queue and the steps."""
        queue = self._new_queue()
        return queue, self._receive(queue, tensor, source, tag)

    def _receive(self, queue: OperationQueue, tensor: Tensor, source: int | None, tag: int) -> Steps:
        status = self.mpi.Status()
        missing = [rank for rank in range(self.size) if rank != self.rank] if source is None else [source]
        mpi_source = self.mpi.ANY_SOURCE if source is None else source
        request = self.communicator.Irecv(self.calls.byte_buffer([tensor]), mpi_source, tag)
        try:
            yield from self.calls.until_done(request, missing, tensor, status)
        except GeneratorExit:
            request.Cancel()  # the next message belongs to the next receive, not to this abandoned one
            raise
        finally:
            del self.pending_queues[queue]
        num_bytes, sender = status.Get_count(self.mpi.BYTE), status.Get_source()
        if num_bytes != tensor.nbytes:
            raise RuntimeError(
                f"recv: rank {self.ranks[sender]} sent {num_bytes} bytes with tag {tag}, and rank "
                f"{self.ranks[self.rank]} receives {tensor.nbytes}; send and receive tensors of one size"
            )
        return sender
