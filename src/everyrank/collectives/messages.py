"""Counted send and receive, in which the all-reduce algorithms are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

__all__ = ["Messages", "Traffic"]


@dataclass
class Traffic:
    """Counts the steps of one rank (send, receive, or both at once) and the elements that it sends."""

    num_steps: int = 0
    num_elements: int = 0


@dataclass(frozen=True)
class Messages:
    """Sends and receives between one rank and the others of a group.

    rank      index of this rank in `ranks`
    ranks     the ranks of the group, as numbered by the process group
    group     the process group of the messages; None: all ranks
    traffic   counts of this rank so far
    """

    rank: int
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def among(self, indices: Sequence[int]) -> Messages:
        """Return Messages between these ranks only (indices in `ranks`), with the same counts."""
        return Messages(indices.index(self.rank), [self.ranks[index] for index in indices], self.group, self.traffic)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to the rank with index `to`; an empty tensor is not sent."""
        self.traffic.num_steps += 1
        self._count(tensor)
        if tensor.numel():
            dist.send(tensor, group=self.group, group_dst=self.ranks[to])

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into `tensor` from the rank with index `source`."""
        self.traffic.num_steps += 1
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=self.ranks[source])

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send and receive at once: if all ranks called send first, they would deadlock."""
        self.traffic.num_steps += 1
        self._count(outgoing)
        works = []
        if outgoing.numel():
            works.append(dist.isend(outgoing, group=self.group, group_dst=self.ranks[to]))
        if incoming.numel():
            works.append(dist.irecv(incoming, group=self.group, group_src=self.ranks[source]))
        for work in works:
            if work is not None:
                work.wait()

    def _count(self, tensor: Tensor) -> None:
        self.traffic.num_elements += tensor.numel()
