"""Lays out the shared memory of a group, and makes its process group for torch."""

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
_FEW_RANKS = 16  # with more ranks, each buffer is smaller, so that the address space of a group stays below a gigabyte
_PAGE = 4096


def make_shm_group(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """A process group over shared memory. A collective of its ranks; `ranks` are their numbers among all ranks.

    Raises `CannotRunError` if the ranks cannot share memory, and `RankFailedError` naming the ranks that do not arrive.
    The system provides each page of the memory when it is first written.
    """
    buffer, entry = buffer_and_entry_bytes(size)
    num_words = LINE * size + words_of_rings(size)
    buffers_start = -(-num_words * 8 // _PAGE) * _PAGE
    entries_start = buffers_start + 2 * size * buffer
    total = entries_start + size * size * NUM_ENTRIES * entry
    seconds = timeout.total_seconds()
    memory, peers = map_shared(store, rank, size, ranks, total, seconds)
    words = memoryview(memory)[:buffers_start].cast("q")
    content = torch.frombuffer(memory, dtype=torch.uint8)
    buffers = content[buffers_start:entries_start].view(2, size, buffer)
    entries = content[entries_start:].view(size * size, NUM_ENTRIES, entry)

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
    """Bytes of a buffer, and of a ring entry, in a group of `size` ranks: whole pages, so that any dtype fits.

    Raises `CannotRunError` for more ranks than a buffer has room for.
    """
    divisor = max(1, size // _FEW_RANKS)
    buffer, entry = _BUFFER_BYTES // divisor // _PAGE * _PAGE, max(_PAGE, _ENTRY_BYTES // divisor**2 // _PAGE * _PAGE)
    if buffer < 128 * size:  # all_to_all sends the length of each part, then at least 64 bytes of it at a time
        raise CannotRunError(f"--backend shm: {size} ranks in a group are too many; use --backend gloo")
    return buffer, entry
