"""Messages between two ranks, counted: what the algorithms are written in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

__all__ = ["Messages", "Traffic"]


@dataclass
class Traffic:
    """What one rank does: steps in which it sends, receives, or both at once; elements that it sends."""

    num_steps: int = 0
    num_elements: int = 0


@dataclass(frozen=True)
class Messages:
    """One rank's links to the others of a group.

    rank      this rank's place in `ranks`
    ranks     the ranks of the group, as the process group numbers them
    group     the process group that carries the messages; None: all ranks
    traffic   what went over the links so far
    """

    rank: int
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def among(self, indices: Sequence[int]) -> Messages:
        """The links between these places alone; what goes over them is counted here, too."""
        return Messages(indices.index(self.rank), [self.ranks[index] for index in indices], self.group, self.traffic)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to the rank at that place. One without elements does not travel."""
        self.traffic.num_steps += 1
        self._count(tensor)
        if tensor.numel():
            dist.send(tensor, group=self.group, group_dst=self.ranks[to])

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for what the rank at that place sends, and write it into `tensor`."""
        self.traffic.num_steps += 1
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=self.ranks[source])

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send and receive at once: where all ranks send first, and only then receive, they wait for each other."""
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
