"""Send and receive over shared memory, through a ring buffer for each ordered pair of ranks.

A message takes as many entries of the ring as it needs; the first has its length and tag. A receiver that waits empties
its rings into the tensor of the first posted `recv` with this source and tag, or, if there is none yet, into a tensor
of its own. So messages with other tags never block the one that is waited for.
What comes after that one stays in the ring: a sender that is ahead waits, and fills no memory of the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import OperationQueue, Steps
from everyrank.backends.shm.chunks import as_bytes
from everyrank.backends.shm.phases import LINE

__all__ = ["NUM_ENTRIES", "Rings", "words_of_rings"]

NUM_ENTRIES = 8  # of a ring
_WORDS = LINE * (2 + NUM_ENTRIES // 4)  # of a ring: written, read, and of each entry the message's length and tag


def words_of_rings(size: int) -> int:
    """8-byte words that the rings of a group need."""
    return size * size * _WORDS


@dataclass(eq=False)
class _Incoming:
    """A message that is asked for, or that has come.

    source   the rank that shall send it; None: any
    content  its bytes, or where they shall go
    sender   the rank that has sent it
    """

    source: int | None
    tag: int
    content: Tensor
    sender: int | None = None
    is_whole: bool = False
    error: str = ""


@dataclass(eq=False)
class _Ring:
    """One direction between two ranks: where its words are, how far this rank has come, what is coming in."""

    first_word: int
    entries: list[Tensor]
    count: int = 0
    current: _Incoming | None = None
    filled: int = 0


@dataclass
class Rings:
    """The rings of a group, as one rank sees them.

    words    8-byte integers of the shared memory, the rings' from `first_word` on
    entries    bytes: [from][to][entry]
    new_queue(is_any_enough) makes a queue of this group
    """

    rank: int
    size: int
    ranks: Sequence[int]
    words: Any
    first_word: int
    entries: Tensor
    new_queue: Callable[[bool], OperationQueue]
    asked: list[_Incoming] = field(default_factory=list[_Incoming])
    unasked: list[_Incoming] = field(default_factory=list[_Incoming])
    rings: dict[tuple[int, int], _Ring] = field(default_factory=dict[tuple[int, int], _Ring])
    sending: dict[int, OperationQueue] = field(default_factory=dict[int, OperationQueue])
    receiving: dict[OperationQueue, None] = field(default_factory=dict[OperationQueue, None])

    def queues(self) -> list[OperationQueue]:
        """Of all messages that may be pending."""
        return [*self.sending.values(), *self.receiving]

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """As `GroupMessages` says."""
        if to not in self.sending:
            self.sending[to] = self.new_queue(False)
        return self.sending[to], self._send(as_bytes(tensor), to, tag)

    def _send(self, content: Tensor, to: int, tag: int) -> Steps:
        ring, words = self._ring(self.rank, to), self.words
        room = len(ring.entries[0])
        for first in range(0, max(1, len(content)), room):
            missing = [to]
            while ring.count - words[ring.first_word + LINE] >= NUM_ENTRIES:
                yield missing
            chunk, entry = content[first : first + room], ring.count % NUM_ENTRIES
            ring.entries[entry][: len(chunk)].copy_(chunk)
            header = ring.first_word + 2 * LINE + 2 * entry
            words[header], words[header + 1] = len(content), tag
            ring.count += 1
            words[ring.first_word] = ring.count

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """As `GroupMessages` says. In its place among the receives from now on, whenever its steps are taken."""
        receive = _Incoming(source, tag, as_bytes(tensor))
        early = next((message for message in self.unasked if _fits(receive, message.sender, message.tag)), None)
        if early is None:
            self.asked.append(receive)
        else:
            self.unasked.remove(early)
        queue = self.new_queue(source is None)
        self.receiving[queue] = None
        return queue, self._receive(queue, receive, early)

    def _receive(self, queue: OperationQueue, receive: _Incoming, early: _Incoming | None) -> Steps:
        awaited = early or receive
        source = awaited.sender if early is not None else receive.source
        sources = [source] if source is not None else [rank for rank in range(self.size) if rank != self.rank]
        missing = list(sources)
        try:
            while not awaited.is_whole:
                if sum(self._empty(rank, awaited) for rank in sources):
                    missing = list(sources)  # something has come: another wait
                if not awaited.is_whole:
                    yield missing
        finally:
            self._forget(receive, awaited)
            del self.receiving[queue]
        if early is not None:
            receive.error = self._check_length(receive, early.sender, len(early.content))
            if not receive.error:
                receive.content.copy_(early.content)
        if receive.error:
            raise RuntimeError(receive.error)
        return awaited.sender

    def _forget(self, receive: _Incoming, awaited: _Incoming) -> None:
        """A receive that was given up takes no message any more; where half of one is here, the rest goes nowhere."""
        if receive in self.asked:
            self.asked.remove(receive)
        elif not awaited.is_whole:
            awaited.content = torch.empty_like(awaited.content)

    def _empty(self, source: int, awaited: _Incoming) -> int:
        """Take what has come from that rank, up to the end of the message that is waited for; how many entries."""
        ring, words = self._ring(source, self.rank), self.words
        before = ring.count
        while not awaited.is_whole and words[ring.first_word] > ring.count:
            entry = ring.count % NUM_ENTRIES
            if ring.current is None:
                header = ring.first_word + 2 * LINE + 2 * entry
                ring.current, ring.filled = self._addressee(source, words[header], words[header + 1]), 0
            current, content = ring.current, ring.current.content
            chunk = content[ring.filled : ring.filled + len(ring.entries[entry])]
            chunk.copy_(ring.entries[entry][: len(chunk)])
            ring.filled += len(chunk)
            ring.count += 1
            words[ring.first_word + LINE] = ring.count
            if ring.filled >= len(content):
                current.is_whole, ring.current = True, None
        return ring.count - before

    def _addressee(self, source: int, length: int, tag: int) -> _Incoming:
        """Who has asked for the message that begins here, or memory for it."""
        for receive in self.asked:
            if _fits(receive, source, tag):
                self.asked.remove(receive)
                receive.sender = source
                receive.error = self._check_length(receive, source, length)
                if receive.error:
                    receive.content = torch.empty(length, dtype=torch.uint8)
                return receive
        unasked = _Incoming(source, tag, torch.empty(length, dtype=torch.uint8), sender=source)
        self.unasked.append(unasked)
        return unasked

    def _check_length(self, receive: _Incoming, sender: int | None, length: int) -> str:
        if len(receive.content) == length:
            return ""
        return (
            f"recv: rank {self.ranks[sender or 0]} sent {length} bytes with tag {receive.tag}, and rank "
            f"{self.ranks[self.rank]} receives {len(receive.content)}: the tensors of a send and its recv are alike"
        )

    def _ring(self, source: int, to: int) -> _Ring:
        ring = self.rings.get((source, to))
        if ring is None:
            index = source * self.size + to
            ring = _Ring(self.first_word + _WORDS * index, list(self.entries[index]))
            self.rings[source, to] = ring
        return ring


def _fits(receive: _Incoming, sender: int | None, tag: int) -> bool:
    return receive.tag == tag and receive.source in (None, sender)
