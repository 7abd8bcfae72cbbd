"""The replay of torch's caching allocator: segments, best fit, splits, neighbours, streams."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from everyrank.plan.caching_allocator import CachingAllocator, Replayed, replay

MIB = 2**20


def allocated(*requests: int, expandable: bool = False) -> CachingAllocator:
    """Return the allocator after requests of these sizes, named 0, 1, 2, ..."""
    allocator = CachingAllocator(expandable)
    for key, size in enumerate(requests):
        allocator.allocate(key, size)
    return allocator


@pytest.mark.parametrize(
    ("requests", "reserved", "in_use"),
    [
        ((1,), 2 * MIB, 512),
        ((MIB, MIB), 2 * MIB, 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB, 2 * MIB + 512),
        ((MIB + 1,), 20 * MIB, MIB + 512),
        ((4 * MIB,) * 5, 20 * MIB, 20 * MIB),
        ((9 * MIB, 9 * MIB, 9 * MIB), 40 * MIB, 27 * MIB),  # 2 MiB of the first segment are left, 11 of the second
        ((10 * MIB,), 10 * MIB, 10 * MIB),
        ((11 * MIB + 1,), 12 * MIB, 12 * MIB),  # a rest of less than 1 MiB is not split off
    ],
)
def test_segments(requests: tuple[int, ...], reserved: int, in_use: int) -> None:
    allocator = allocated(*requests)
    assert (allocator.reserved, allocator.allocated) == (reserved, in_use)


def test_the_smallest_block_that_is_large_enough() -> None:
    """Of free blocks of 30, 16 and 12 MiB, 15 MiB take the one of 16, and the next 15 that of 30."""
    allocator = allocated(30 * MIB, 16 * MIB, 12 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate("a", 15 * MIB)
    assert allocator.allocated == 16 * MIB
    allocator.allocate("b", 15 * MIB)
    assert (allocator.allocated, allocator.reserved) == (31 * MIB, 58 * MIB)


def test_free_neighbours_become_one_block() -> None:
    """In whatever order they are freed; blocks of other segments never join."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        allocator = allocated(6 * MIB, 6 * MIB, 6 * MIB)
        assert allocator.reserved == 20 * MIB
        for key in order:
            allocator.free(key)
        allocator.allocate("whole", 20 * MIB)
        assert allocator.reserved == 20 * MIB
    allocator = allocated(20 * MIB, 20 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate("larger", 40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_streams_do_not_share_blocks() -> None:
    events = [(8 * MIB, 0, 0), (-8 * MIB, 0, 0), (8 * MIB, 1, 1)]
    assert replay(events).reserved == 40 * MIB
    assert replay([(size, key, 0) for size, key, _ in events]).reserved == 20 * MIB


def test_a_storage_that_is_resized_is_allocated_again() -> None:
    """As FSDP2 does with gathered parameters."""
    events = [(30 * MIB, 0, 0), (-30 * MIB, 0, 0), (20 * MIB, 1, 0), (30 * MIB, 0, 0)]
    assert replay(events).reserved == 60 * MIB


def test_peaks_before_and_from_an_event_on() -> None:
    """Blocks count, not requests; what is alive at the start belongs to both."""
    events = [(12 * MIB, 0, 0), (12 * MIB, 1, 0), (-12 * MIB, 1, 0), (100, 2, 0)]
    assert replay(events, start=3) == Replayed(24 * MIB, 12 * MIB + 512, 26 * MIB)


def test_expandable_segments_grow() -> None:
    """Slivers that no larger request fits in are avoided; small and large requests stay apart."""
    growing = [size * MIB for size in (20, 24, 28, 32)]
    events: list[tuple[int, int, int]] = []
    for key, size in enumerate(growing):
        events += [(size, key, 0), (-size, key, 0)]
    assert replay(events).reserved == sum(growing)
    assert replay(events, expandable_segments=True).reserved == 40 * MIB
    assert allocated(MIB, 30 * MIB, expandable=True).reserved == 42 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap(expandable: bool) -> None:
    """After thousands of requests every byte belongs to one block, and all of it is free at the end."""
    chance = random.Random(0)
    allocator, alive = CachingAllocator(expandable), dict[int, int]()
    for key in range(3000):
        alive[key] = chance.choice([chance.randrange(1, MIB), chance.randrange(MIB, 40 * MIB)])
        allocator.allocate(key, alive[key], stream=chance.randrange(2))
        while len(alive) > 30:
            gone = chance.choice(list(alive))
            allocator.free(gone)
            del alive[gone]
        if key % 500 == 0:
            blocks = sorted((block.address, block.size) for _, block in allocator._in_use.values())
            assert all(first + size <= second for (first, size), (second, _) in pairwise(blocks))
        assert sum(alive.values()) <= allocator.allocated <= allocator.reserved
    for key in alive:
        allocator.free(key)
    free = [size for pool in allocator._pools.values() for size, _ in pool.order]
    assert allocator.allocated == 0
    assert sum(free) == allocator.reserved
    if expandable:
        assert len(free) == 4  # two streams, small and large


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not verified here: needs a GPU")
def test_the_allocator_of_a_gpu() -> None:
    """The same requests on a GPU reserve the same bytes."""
    torch.cuda.empty_cache()
    start, start_in_use = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    chance, allocator, alive = random.Random(1), CachingAllocator(), dict[int, torch.Tensor]()
    for key in range(400):
        size = chance.choice([chance.randrange(1, MIB), chance.randrange(MIB, 40 * MIB)])
        alive[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
        allocator.allocate(key, size)
        while len(alive) > 12:
            gone = chance.choice(list(alive))
            allocator.free(gone)
            del alive[gone]
        assert torch.cuda.memory_allocated() - start_in_use == allocator.allocated
    assert torch.cuda.memory_reserved() - start == allocator.reserved
