"""Send and receive over shared memory, through a ring buffer for each ordered pair of ranks.

A message takes as many entries of the ring as it needs; the first has its length and tag. A waiting receiver empties
its rings. A message goes into the tensor of the first posted receive with its source and tag, or, if there is none yet,
into a temporary buffer. So messages with other tags never block the awaited one. Messages after the awaited one stay in
the ring: a sender that is ahead waits, and does not fill the memory of the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import OperationQueue, Steps
from everyrank.backends.shm.chunks import as_bytes
from everyrank.backends.shm.phases import LINE_WORDS

__all__ = ["NUM_ENTRIES", "Rings", "num_ring_words"]

NUM_ENTRIES = 8  # of a ring
# Words of a ring: the number of written entries, the number of read entries, and the length and tag of each entry. The
# two numbers have a cache line each.
_RING_WORDS = LINE_WORDS * (2 + NUM_ENTRIES // 4)


def num_ring_words(size: int) -> int:
    """Return the number of 8-byte words for all rings of a group."""
    return size * size * _RING_WORDS


@dataclass(eq=False)
class _Message:
    """A posted receive, or a message that has arrived before its receive was posted.

    source       the requested source of a receive; None: any rank
    content      the bytes of the message, or the buffer for them
    sender       the rank that has sent it
    is_complete  whether all of it has arrived
    error        why a receive fails: the message has a different length
    """

    source: int | None
    tag: int
    content: Tensor
    sender: int | None = None
    is_complete: bool = False
    error: str = ""


@dataclass(eq=False)
class _Ring:
    """One direction between two ranks, with the progress of this rank.

    first_word      index of the ring's first word
    entries         bytes of each entry
    num_done        number of entries that this rank has written or read
    current         the message whose entries are arriving
    received_bytes  bytes of `current` that have arrived
    """

    first_word: int
    entries: list[Tensor]
    num_done: int = 0
    current: _Message | None = None
    received_bytes: int = 0


@dataclass
class Rings:
    """The rings of a group, as one rank sees them.

    ranks       the global rank of each rank of the group, for messages
    words       8-byte integers in shared memory, those of the rings from `first_word` on
    entries     bytes: [sender * size + receiver][entry]
    new_queue   new_queue(from_any_source) returns a new queue of this group
    posted      receives whose message has not begun to arrive
    unexpected  messages that have arrived before their receive was posted
    sending     the queue of the messages to each rank
    receiving   the queue of each pending receive
    """

    rank: int
    size: int
    ranks: Sequence[int]
    words: Any
    first_word: int
    entries: Tensor
    new_queue: Callable[[bool], OperationQueue]
    posted: list[_Message] = field(default_factory=list[_Message])
    unexpected: list[_Message] = field(default_factory=list[_Message])
    rings: dict[tuple[int, int], _Ring] = field(default_factory=dict[tuple[int, int], _Ring])
    sending: dict[int, OperationQueue] = field(default_factory=dict[int, OperationQueue])
    receiving: dict[OperationQueue, None] = field(default_factory=dict[OperationQueue, None])

    def queues(self) -> list[OperationQueue]:
        """Return the queues of all messages that may be pending."""
        return [*self.sending.values(), *self.receiving]

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[OperationQueue, Steps]:
        """Send `tensor` to rank `to`; return the queue of the message and its steps."""
        if to not in self.sending:
            self.sending[to] = self.new_queue(False)
        return self.sending[to], self._send(as_bytes(tensor), to, tag)

    def _send(self, content: Tensor, to: int, tag: int) -> Steps:
        ring, words = self._ring(self.rank, to), self.words
        entry_bytes = len(ring.entries[0])
        for first in range(0, max(1, len(content)), entry_bytes):
            missing = [to]
            while ring.num_done - words[ring.first_word + LINE_WORDS] >= NUM_ENTRIES:
                yield missing
            chunk, entry = content[first : first + entry_bytes], ring.num_done % NUM_ENTRIES
            ring.entries[entry][: len(chunk)].copy_(chunk)
            header = ring.first_word + 2 * LINE_WORDS + 2 * entry
            words[header], words[header + 1] = len(content), tag
            ring.num_done += 1
            words[ring.first_word] = ring.num_done  # last, because it tells the receiver that the entry is complete

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[OperationQueue, Steps]:
        """Receive into `tensor` from `source`, or from any rank (None); return the queue and the steps.

        The receive is posted now, before its steps run, so the order of the calls counts.
        """
        receive = _Message(source, tag, as_bytes(tensor))
        arrived = next((message for message in self.unexpected if _matches(receive, message.sender, message.tag)), None)
        if arrived is None:
            self.posted.append(receive)
        else:
            self.unexpected.remove(arrived)
        queue = self.new_queue(source is None)
        self.receiving[queue] = None
        return queue, self._receive(queue, receive, arrived)

    def _receive(self, queue: OperationQueue, receive: _Message, arrived: _Message | None) -> Steps:
        """Wait for the message of a receive; `arrived` is the one that has begun to arrive before it was posted."""
        awaited = arrived or receive
        source = awaited.sender if arrived is not None else receive.source
        sources = [source] if source is not None else [rank for rank in range(self.size) if rank != self.rank]
        missing = list(sources)
        try:
            while not awaited.is_complete:
                if sum(self._drain(rank, awaited) for rank in sources):
                    missing = list(sources)  # entries have arrived, so this is a new wait
                if not awaited.is_complete:
                    yield missing
        finally:
            self._withdraw(receive, awaited)
            del self.receiving[queue]
        if arrived is not None:
            receive.error = self._check_length(receive, arrived.sender, len(arrived.content))
            if not receive.error:
                receive.content.copy_(arrived.content)
        if receive.error:
            raise RuntimeError(receive.error)
        return awaited.sender

    def _withdraw(self, receive: _Message, awaited: _Message) -> None:
        """Withdraw a receive that has ended or failed, so that it takes no later message.

        If its message has arrived only in part, the rest goes into a buffer that is not read.
        """
        if receive in self.posted:
            self.posted.remove(receive)
        elif not awaited.is_complete:
            awaited.content = torch.empty_like(awaited.content)

    def _drain(self, source: int, awaited: _Message) -> int:
        """Copy the entries that have arrived from that rank, up to the end of the awaited message; return how many."""
        ring, words = self._ring(source, self.rank), self.words
        num_done_before = ring.num_done
        while not awaited.is_complete and words[ring.first_word] > ring.num_done:
            entry = ring.num_done % NUM_ENTRIES
            if ring.current is None:
                header = ring.first_word + 2 * LINE_WORDS + 2 * entry
                ring.current, ring.received_bytes = self._match(source, words[header], words[header + 1]), 0
            current, content = ring.current, ring.current.content
            chunk = content[ring.received_bytes : ring.received_bytes + len(ring.entries[entry])]
            chunk.copy_(ring.entries[entry][: len(chunk)])
            ring.received_bytes += len(chunk)
            ring.num_done += 1
            words[ring.first_word + LINE_WORDS] = ring.num_done
            if ring.received_bytes >= len(content):
                current.is_complete, ring.current = True, None
        return ring.num_done - num_done_before

    def _match(self, source: int, length: int, tag: int) -> _Message:
        """Return the posted receive for a message that begins to arrive, or a new unexpected message."""
        for receive in self.posted:
            if _matches(receive, source, tag):
                self.posted.remove(receive)
                receive.sender = source
                receive.error = self._check_length(receive, source, length)
                if receive.error:
                    receive.content = torch.empty(length, dtype=torch.uint8)
                return receive
        unexpected = _Message(source, tag, torch.empty(length, dtype=torch.uint8), sender=source)
        self.unexpected.append(unexpected)
        return unexpected

    def _check_length(self, receive: _Message, sender: int | None, length: int) -> str:
        """Return the error of a receive whose message has a different length; "" if it fits."""
        if len(receive.content) == length:
            return ""
        return (
            f"recv: rank {self.ranks[sender or 0]} sent {length} bytes with tag {receive.tag}, and rank "
            f"{self.ranks[self.rank]} receives {len(receive.content)}; send and receive tensors of one size"
        )

    def _ring(self, source: int, to: int) -> _Ring:
        ring = self.rings.get((source, to))
        if ring is None:
            index = source * self.size + to
            ring = _Ring(self.first_word + _RING_WORDS * index, list(self.entries[index]))
            self.rings[source, to] = ring
        return ring


def _matches(receive: _Message, sender: int | None, tag: int) -> bool:
    return receive.tag == tag and receive.source in (None, sender)
