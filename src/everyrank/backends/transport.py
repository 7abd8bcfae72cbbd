"""What a backend has to give: generators (engine.py) that move flat tensors on CPU."""

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
        """The reduction of what all ranks have, in `tensor` of each."""
        ...

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """The same on the root alone; `tensor` of the others stays."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """What the root has, in `tensor` of each."""
        ...

    def all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        """`own` of each rank, in `parts` of all."""
        ...

    def gather(self, parts: list[Tensor], sent: Tensor, root: int) -> Steps:
        """`own` of each rank, in `parts` of the root, which are empty elsewhere."""
        ...

    def scatter(self, received: Tensor, parts: list[Tensor], root: int) -> Steps:
        """`parts` of the root, which are empty elsewhere, one in `own` of each rank."""
        ...

    def reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """The reduction of all ranks' `parts`, one in `own` of each rank."""
        ...

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """`sent[s]` of rank r is `received[r]` of rank s; they may differ in length."""
        ...

    def barrier(self) -> Steps:
        """Nobody goes on before all have come."""
        ...


class GroupMessages(Protocol):
    """The messages between two ranks of one group."""

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """A message, and the queue in which it waits."""
        ...

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """The next message from that rank, or from any; its sender is the value of the steps."""
        ...

    def queues(self) -> list[OperationQueue]:
        """Of all messages that may be pending."""
        ...


@dataclass(frozen=True)
class Transport:
    """What moves the bytes of one group.

    backend      its name
    collectives  in `queue`, one after the other
    close        lets go of what the group held
    """

    backend: str
    collectives: GroupCollectives
    messages: GroupMessages
    queue: OperationQueue
    close: Callable[[], None]

    def queues(self) -> list[OperationQueue]:
        """Of everything that may be pending."""
        return [self.queue, *self.messages.queues()]
