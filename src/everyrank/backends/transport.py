"""Transport: the interface of a backend. Its operations are generators (engine.py) over flat CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from everyrank.backends.operation_queue import OperationQueue, Steps

__all__ = ["GroupCollectives", "GroupMessages", "Transport"]


class GroupCollectives(Protocol):
    """The collectives of one group.

    All tensors are contiguous, one-dimensional and on the CPU. The lists `inputs` and `outputs` have one tensor for
    each rank. `root` is a rank of the group.
    """

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """Reduce `tensor` over all ranks, in place on each rank."""
        ...

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """Reduce `tensor` over all ranks, in place on the root; `tensor` of the other ranks is unchanged."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Copy `tensor` of the root to all ranks."""
        ...

    def all_gather(self, outputs: list[Tensor], input_tensor: Tensor) -> Steps:
        """Copy `input_tensor` of rank r to `outputs[r]` of every rank."""
        ...

    def gather(self, outputs: list[Tensor], input_tensor: Tensor, root: int) -> Steps:
        """Copy `input_tensor` of rank r to `outputs[r]` of the root; `outputs` is empty on the other ranks."""
        ...

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int) -> Steps:
        """Copy `inputs[r]` of the root to `output` of rank r; `inputs` is empty on the other ranks."""
        ...

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], reduction: str) -> Steps:
        """Reduce `inputs[r]` over all ranks into `output` of rank r."""
        ...

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        """Copy `inputs[s]` of rank r to `outputs[r]` of rank s; lengths may differ."""
        ...

    def barrier(self) -> Steps:
        """Wait until all ranks have reached the barrier."""
        ...


class GroupMessages(Protocol):
    """The messages between two ranks of one group."""

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """Send `tensor` to rank `to`; return the queue of the message and its steps."""
        ...

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """Receive into `tensor` from `source`, or from any rank (None); return the queue and the steps.

        The steps return the sender.
        """
        ...

    def queues(self) -> list[OperationQueue]:
        """Return the queues of all messages that may be pending."""
        ...


@dataclass(frozen=True)
class Transport:
    """The implementation of one group.

    backend      name of the backend
    collectives  run one after the other in `queue`
    messages     send and receive; each has a queue of its own
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
