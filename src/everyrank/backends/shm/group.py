"""The memory of a group laid out, and the group that torch sees."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from everyrank.backends.engine import ENGINE
from everyrank.backends.group import PythonGroup
from everyrank.backends.operation_queue import OperationQueue
from everyrank.backends.shm.collectives import SharedBuffers
from everyrank.backends.shm.messages import NUM_ENTRIES, Rings, words_of_rings
from everyrank.backends.shm.phases import LINE
from everyrank.backends.shm.segment import map_shared
from everyrank.backends.transport import Transport
from everyrank.errors import CannotRunError

__all__ = ["buffer_and_entry_bytes", "make_shm_group"]

_BUFFER_BYTES = 2**21
_ENTRY_BYTES = 2**18
_FEW_RANKS = 16  # of more ranks each has less, so that the address space of a group stays below a gigabyte
_PAGE = 4096


def make_shm_group(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """A process group over shared memory. A collective of its ranks; `ranks` are their numbers among all ranks.

    Raises `CannotRunError` where they share none, and `RankFailedError` naming who does not come. The memory is taken
    from the machine page by page, when it is first written.
    """
    buffer, entry = buffer_and_entry_bytes(size)
    num_words = LINE * size + words_of_rings(size)
    first_slot = -(-num_words * 8 // _PAGE) * _PAGE
    first_cell = first_slot + 2 * size * buffer
    total = first_cell + size * size * NUM_ENTRIES * entry
    seconds = timeout.total_seconds()
    memory, peers = map_shared(store, rank, size, ranks, total, seconds)
    words = memoryview(memory)[:first_slot].cast("q")
    content = torch.frombuffer(memory, dtype=torch.uint8)
    buffers = content[first_slot:first_cell].view(2, size, buffer)
    entries = content[first_cell:].view(size * size, NUM_ENTRIES, entry)

    collectives = SharedBuffers(rank, size, ranks, words, 0, [list(row) for row in buffers])

    queue = OperationQueue(ranks, seconds, broke=collectives.give_up)

    def lost(missing: Sequence[int]) -> dict[int, str]:
        gave_up = [group_rank for group_rank in missing if collectives.gave_up(group_rank)]
        return {
            group_rank: f"rank {ranks[group_rank]} has failed in this group" for group_rank in gave_up
        } | peers.lost(missing)

    queue.lost = lost

    def new_queue(is_any_enough: bool) -> OperationQueue:
        return OperationQueue(ranks, queue.timeout_seconds, lost, is_any_enough, is_message=True)

    # all cores: launchers may bind each rank to one of its own
    ENGINE.is_oversubscribed = ENGINE.is_oversubscribed or size > (os.cpu_count() or size)
    transport = Transport(
        "shm",
        collectives,
        Rings(rank, size, ranks, words, LINE * size, entries, new_queue),
        queue,
        peers.close,
    )
    return PythonGroup(transport, rank, size, name)


def buffer_and_entry_bytes(size: int) -> tuple[int, int]:
    """Bytes of a buffer and of a ring entry in a group of so many ranks, both whole pages, so that any dtype fits.

    Raises `CannotRunError` for more ranks than a buffer has room for.
    """
    share = max(1, size // _FEW_RANKS)
    buffer, entry = _BUFFER_BYTES // share // _PAGE * _PAGE, max(_PAGE, _ENTRY_BYTES // share**2 // _PAGE * _PAGE)
    if buffer < 128 * size:  # all_to_all: how long each part is, and 64 bytes of it
        raise CannotRunError(f"--backend shm: {size} ranks in a group are too many; use --backend gloo")
    return buffer, entry
