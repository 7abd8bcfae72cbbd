"""Messages over shared memory: for each pair of ranks and direction a ring of cells, filled by one and emptied by one.

A message takes as many cells as it needs; the first says how long it is and its tag. A receiver that waits empties the
rings it listens to: into the tensor of the first `recv` that fits by source and tag, or, where nobody has asked for the
message yet, into memory of its own. So messages of other tags never stand in the way of the one that is waited for.
What comes after that one stays in the ring: a sender that is ahead waits, and fills no memory of the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.lane import Lane, Steps
from everyrank.backends.shm.phases import LINE
from everyrank.backends.shm.pieces import as_bytes

__all__ = ["NUM_CELLS", "Rings", "words_of_rings"]

NUM_CELLS = 8  # of a ring
_WORDS = LINE * (2 + NUM_CELLS // 4)  # of a ring: written, read, and of each cell the message's length and tag


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
    cells: list[Tensor]
    count: int = 0
    current: _Incoming | None = None
    filled: int = 0


@dataclass
class Rings:
    """The rings of a group, as one rank sees them.

    words    8-byte integers of the shared memory, the rings' from `first_word` on
    cells    bytes: [from][to][cell]
    new_lane (whether one of several ranks is enough) makes a lane of this group
    """

    rank: int
    size: int
    ranks: Sequence[int]
    words: Any
    first_word: int
    cells: Tensor
    new_lane: Callable[[bool], Lane]
    asked: list[_Incoming] = field(default_factory=list[_Incoming])
    unasked: list[_Incoming] = field(default_factory=list[_Incoming])
    rings: dict[tuple[int, int], _Ring] = field(default_factory=dict[tuple[int, int], _Ring])
    sending: dict[int, Lane] = field(default_factory=dict[int, Lane])
    receiving: dict[Lane, None] = field(default_factory=dict[Lane, None])

    def lanes(self) -> list[Lane]:
        """Of all messages that may be pending."""
        return [*self.sending.values(), *self.receiving]

    def send(self, tensor: Tensor, to: int, tag: int) -> tuple[Lane, Steps]:
        """As `GroupMessages` says."""
        if to not in self.sending:
            self.sending[to] = self.new_lane(False)
        return self.sending[to], self._send(as_bytes(tensor), to, tag)

    def _send(self, content: Tensor, to: int, tag: int) -> Steps:
        ring, words = self._ring(self.rank, to), self.words
        room = len(ring.cells[0])
        for first in range(0, max(1, len(content)), room):
            missing = [to]
            while ring.count - words[ring.first_word + LINE] >= NUM_CELLS:
                yield missing
            piece, cell = content[first : first + room], ring.count % NUM_CELLS
            ring.cells[cell][: len(piece)].copy_(piece)
            header = ring.first_word + 2 * LINE + 2 * cell
            words[header], words[header + 1] = len(content), tag
            ring.count += 1
            words[ring.first_word] = ring.count

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> tuple[Lane, Steps]:
        """As `GroupMessages` says. In its place among the receives from now on, whenever its steps are taken."""
        asked = _Incoming(source, tag, as_bytes(tensor))
        found = next((one for one in self.unasked if _fits(asked, one.sender, one.tag)), None)
        if found is None:
            self.asked.append(asked)
        else:
            self.unasked.remove(found)
        lane = self.new_lane(source is None)
        self.receiving[lane] = None
        return lane, self._receive(lane, asked, found)

    def _receive(self, lane: Lane, asked: _Incoming, found: _Incoming | None) -> Steps:
        awaited = found or asked
        source = awaited.sender if found is not None else asked.source
        sources = [source] if source is not None else [rank for rank in range(self.size) if rank != self.rank]
        missing = list(sources)
        try:
            while not awaited.is_whole:
                if sum(self._empty(rank, awaited) for rank in sources):
                    missing = list(sources)  # something has come: another wait
                if not awaited.is_whole:
                    yield missing
        finally:
            self._forget(asked, awaited)
            del self.receiving[lane]
        if found is not None:
            asked.error = self._check_length(asked, found.sender, len(found.content))
            if not asked.error:
                asked.content.copy_(found.content)
        if asked.error:
            raise RuntimeError(asked.error)
        return awaited.sender

    def _forget(self, asked: _Incoming, awaited: _Incoming) -> None:
        """A receive that was given up takes no message any more; where half of one is here, the rest goes nowhere."""
        if asked in self.asked:
            self.asked.remove(asked)
        elif not awaited.is_whole:
            awaited.content = torch.empty_like(awaited.content)

    def _empty(self, source: int, awaited: _Incoming) -> int:
        """Take what has come from that rank, up to the end of the message that is waited for; how many cells."""
        ring, words = self._ring(source, self.rank), self.words
        before = ring.count
        while not awaited.is_whole and words[ring.first_word] > ring.count:
            cell = ring.count % NUM_CELLS
            if ring.current is None:
                header = ring.first_word + 2 * LINE + 2 * cell
                ring.current, ring.filled = self._addressee(source, words[header], words[header + 1]), 0
            current, content = ring.current, ring.current.content
            piece = content[ring.filled : ring.filled + len(ring.cells[cell])]
            piece.copy_(ring.cells[cell][: len(piece)])
            ring.filled += len(piece)
            ring.count += 1
            words[ring.first_word + LINE] = ring.count
            if ring.filled >= len(content):
                current.is_whole, ring.current = True, None
        return ring.count - before

    def _addressee(self, source: int, length: int, tag: int) -> _Incoming:
        """Who has asked for the message that begins here, or memory for it."""
        for asked in self.asked:
            if _fits(asked, source, tag):
                self.asked.remove(asked)
                asked.sender = source
                asked.error = self._check_length(asked, source, length)
                if asked.error:
                    asked.content = torch.empty(length, dtype=torch.uint8)
                return asked
        unasked = _Incoming(source, tag, torch.empty(length, dtype=torch.uint8), sender=source)
        self.unasked.append(unasked)
        return unasked

    def _check_length(self, asked: _Incoming, sender: int | None, length: int) -> str:
        if len(asked.content) == length:
            return ""
        return (
            f"recv: rank {self.ranks[sender or 0]} sent {length} bytes with tag {asked.tag}, and rank "
            f"{self.ranks[self.rank]} receives {len(asked.content)}: the tensors of a send and its recv are alike"
        )

    def _ring(self, source: int, to: int) -> _Ring:
        ring = self.rings.get((source, to))
        if ring is None:
            place = source * self.size + to
            ring = _Ring(self.first_word + _WORDS * place, list(self.cells[place]))
            self.rings[source, to] = ring
        return ring


def _fits(asked: _Incoming, sender: int | None, tag: int) -> bool:
    return asked.tag == tag and asked.source in (None, sender)
