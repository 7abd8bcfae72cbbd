"""Transport: the interface of a backend. Its operations are generators (engine.py) over flat CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from everyrank.backends.operation_queue import OperationQueue, Steps

__all__ = ["GroupCollectives", "GroupMessages", "Transport"]


class GroupCollectives(Protocol):
    """The collectives of one group. All tensors are on CPU, contiguous and flat; lists have one for each rank."""

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """Reduce `tensor` over all ranks, in place on each."""
        ...

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """Reduce `tensor` over all ranks into that of the root; `tensor` of the others is unchanged."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Copy `tensor` of the root to all ranks."""
        ...

    def all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        """Collect `sent` of each rank in `parts` of all."""
        ...

    def gather(self, parts: list[Tensor], sent: Tensor, root: int) -> Steps:
        """Collect `sent` of each rank in `parts` of the root; `parts` is empty on the others."""
        ...

    def scatter(self, received: Tensor, parts: list[Tensor], root: int) -> Steps:
        """Copy one of the root's `parts` to `received` of each rank; `parts` is empty on the others."""
        ...

    def reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """Reduce `parts` over all ranks; rank r gets part r in `received`."""
        ...

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """Copy `sent[s]` of rank r to `received[r]` of rank s; lengths may differ."""
        ...

    def barrier(self) -> Steps:
        """Wait until all ranks have reached the barrier."""
        ...


class GroupMessages(Protocol):
    """The messages between two ranks of one group."""

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """Send `tensor`; return the queue of the message and its steps."""
        ...

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """Receive from `source`, or from any rank (None); the steps return the sender."""
        ...

    def queues(self) -> list[OperationQueue]:
        """Return the queues of all messages that may be pending."""
        ...


@dataclass(frozen=True)
class Transport:
    """The implementation of one group.

    backend      name of the backend
    collectives  run one after the other in `queue`
    close        releases the resources of the group
    """

    backend: str
    collectives: GroupCollectives
    messages: GroupMessages
    queue: OperationQueue
    close: Callable[[], None]

    def queues(self) -> list[OperationQueue]:
        """Return the queues of everything that may be pending."""
        return [self.queue, *self.messages.queues()]
