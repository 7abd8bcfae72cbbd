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
from everyrank.backends.shm.collectives import SharedMemoryCollectives
from everyrank.backends.shm.messages import NUM_ENTRIES, Rings, num_ring_words
from everyrank.backends.shm.phases import LINE_WORDS
from everyrank.backends.shm.segment import map_shared
from everyrank.backends.transport import Transport
from everyrank.errors import CannotRunError

__all__ = ["buffer_and_entry_bytes", "make_shm_group"]

_BUFFER_BYTES = 2**21
_ENTRY_BYTES = 2**18
_MAX_FULL_SIZE_RANKS = 16  # with more ranks, buffers are smaller, so that a group stays below a gigabyte
_PAGE_BYTES = 4096


def make_shm_group(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """Return a process group over shared memory. A collective of its ranks, whose global ranks are `ranks`.

    Raises `CannotRunError` if the ranks cannot share memory, and `RankFailedError` naming a rank that does not arrive.
    The operating system allocates each page of the memory when it is first written.
    """
    buffer_bytes, entry_bytes = buffer_and_entry_bytes(size)
    num_words = LINE_WORDS * size + num_ring_words(size)
    buffers_start = -(-num_words * 8 // _PAGE_BYTES) * _PAGE_BYTES
    entries_start = buffers_start + 2 * size * buffer_bytes
    total_bytes = entries_start + size * size * NUM_ENTRIES * entry_bytes
    timeout_seconds = timeout.total_seconds()
    memory, peers = map_shared(store, rank, size, ranks, total_bytes, timeout_seconds)
    words = memoryview(memory)[:buffers_start].cast("q")
    memory_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    buffers = memory_bytes[buffers_start:entries_start].view(2, size, buffer_bytes)
    entries = memory_bytes[entries_start:].view(size * size, NUM_ENTRIES, entry_bytes)

    collectives = SharedMemoryCollectives(rank, size, ranks, words, 0, [list(row) for row in buffers])
    queue = OperationQueue(ranks, timeout_seconds, on_failure=collectives.set_failed)

    def find_lost(missing: Sequence[int]) -> dict[int, str]:
        failed = [group_rank for group_rank in missing if collectives.has_failed(group_rank)]
        return {
            group_rank: f"rank {ranks[group_rank]} has failed in this group" for group_rank in failed
        } | peers.find_ended(missing)

    queue.find_lost = find_lost

    def new_queue(from_any_source: bool) -> OperationQueue:
        return OperationQueue(ranks, queue.timeout_seconds, find_lost, from_any_source, is_message=True)

    # compared with all cores of the host, because launchers may bind each rank to one core
    ENGINE.is_oversubscribed = ENGINE.is_oversubscribed or size > (os.cpu_count() or size)
    transport = Transport(
        "shm",
        collectives,
        Rings(rank, size, ranks, words, LINE_WORDS * size, entries, new_queue),
        queue,
        peers.close,
    )
    return PythonGroup(transport, rank, size, name)


def buffer_and_entry_bytes(size: int) -> tuple[int, int]:
    """Return the bytes of a buffer and of a ring entry in a group of `size` ranks: whole pages, so that any dtype fits.

    Raises `CannotRunError` for too many ranks for a buffer.
    """
    divisor = -(-size // _MAX_FULL_SIZE_RANKS)
    buffer_bytes = _BUFFER_BYTES // divisor // _PAGE_BYTES * _PAGE_BYTES
    entry_bytes = max(_PAGE_BYTES, _ENTRY_BYTES // divisor**2 // _PAGE_BYTES * _PAGE_BYTES)
    if buffer_bytes < 128 * size:  # all_to_all sends the length for each rank, and then at least 64 bytes at a time
        raise CannotRunError(f"--backend shm: {size} ranks in a group are too many; use --backend gloo")
    return buffer_bytes, entry_bytes
