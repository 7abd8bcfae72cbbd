"""Replays torch's caching allocator for CUDA: the bytes that it reserves for a sequence of allocations and frees.

A request is rounded to 512 bytes. It takes the smallest free block of its stream that is large enough. What remains of
the block stays free if it is at least 512 bytes (of a small request) or more than 1 MiB (of a large one). Without such
a block, a new segment is reserved: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB, and the request
rounded to 2 MiB for larger ones. Neighbours that are free become one block. Segments stay reserved.

With `expandable_segments:True`, each stream has one segment for small and one for large requests, which grow.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.11).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["CachingAllocator", "Replayed", "replay"]

_ROUND, _SMALL, _LARGE = 512, 2**20, 10 * 2**20
_ADDRESSES = 2**50  # address space of an expandable segment
_SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND_SEGMENT = 2**21, 20 * 2**20, 2**21


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, with its neighbours."""

    address: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False


@dataclass(slots=True)
class _Pool:
    """The free blocks of a stream for small or for large requests, by size and address.

    last    with expandable segments, the block at the end of the segment
    """

    is_small: bool
    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: dict[int, _Block] = field(default_factory=dict[int, _Block])
    last: _Block | None = None

    def add(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self.order, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.order[bisect.bisect_left(self.order, (block.size, block.address))]
        del self.blocks[block.address]

    def smallest(self, size: int) -> _Block | None:
        """Return the smallest block of at least `size` bytes; the last, expandable block only if there is no other."""
        index = bisect.bisect_left(self.order, (size, 0))
        if index == len(self.order):
            return None
        block = self.blocks[self.order[index][1]]
        if block is self.last and index + 1 < len(self.order):
            block = self.blocks[self.order[index + 1][1]]
        return block


class CachingAllocator:
    """The allocator of one device.

    allocated   bytes of the blocks in use, as torch.cuda.memory_allocated; peak_allocated: its peak
    reserved    bytes of all segments, as torch.cuda.memory_reserved

    Example:
        allocator = CachingAllocator()
        allocator.allocate("weight", 4 * 2**20)
        allocator.reserved    # 20 MiB

    """

    def __init__(self, expandable_segments: bool = False) -> None:
        self.expandable = expandable_segments
        self.allocated = self.peak_allocated = self.reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._in_use: dict[object, tuple[_Pool, _Block]] = {}
        self._next_address = 0

    def allocate(self, key: object, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes (more than 0) under the name `key`."""
        size = -(-size // _ROUND) * _ROUND
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.smallest(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grow(pool, size) if self.expandable else self._new_segment(size)
        remaining_bytes = block.size - size
        if remaining_bytes >= _ROUND if is_small or self.expandable else remaining_bytes > _SMALL:
            self._split(pool, block, size)
        self._in_use[key] = pool, block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: object) -> None:
        """Free the block of `key`, and join it with free neighbours."""
        pool, block = self._in_use.pop(key)
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                if pool.last is second:
                    pool.last = first
                block = first
        pool.add(block)

    def _new_segment(self, size: int) -> _Block:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        block = _Block(self._next_address, segment)
        self._next_address += segment
        self.reserved += segment
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Extend the segment of a stream, so that its last block has at least `size` bytes."""
        step = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        last = pool.last
        free = last if last is not None and last.is_free else None
        missing = -(-(size - (free.size if free else 0)) // step) * step
        self.reserved += missing
        if free is not None:
            pool.remove(free)
            free.size += missing
            return free
        end = last.address + last.size if last is not None else len(self._pools) * _ADDRESSES
        pool.last = _Block(end, missing, last)
        if last is not None:
            last.after = pool.last
        return pool.last

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        remainder = _Block(block.address + size, block.size - size, block, block.after)
        if block.after is not None:
            block.after.before = remainder
        block.after, block.size = remainder, size
        if pool.last is block:
            pool.last = remainder
        pool.add(remainder)


@dataclass(frozen=True)
class Replayed:
    """Bytes of a replay: the allocated peak of each section of the events, and the reserved bytes at the end.

    Allocated bytes are those of blocks, as torch counts them: a few per mille more than the tensors have.
    """

    peaks: tuple[int, ...]
    reserved: int


def replay(
    events: Sequence[tuple[int, int, int]], ends: Sequence[int] = (), expandable_segments: bool = False
) -> Replayed:
    """Replay (change in bytes, key, stream) of each storage, in order, and return the bytes of the allocator.

    `ends` are the indices of the events at which a section ends and the next begins; the last section ends with the
    events. A storage that changes its size is freed and allocated again, as `UntypedStorage.resize_` does.
    """
    allocator = CachingAllocator(expandable_segments)
    sizes: dict[int, int] = {}
    peaks: list[int] = []
    for start, end in itertools.pairwise((0, *ends, len(events))):
        allocator.peak_allocated = allocator.allocated
        for change, key, stream in events[start:end]:
            old_size = sizes.pop(key, 0)
            if old_size:
                allocator.free(key)
            if old_size + change > 0:
                sizes[key] = old_size + change
                allocator.allocate(key, old_size + change, stream)
        peaks.append(allocator.peak_allocated)
    return Replayed(tuple(peaks), allocator.reserved)
