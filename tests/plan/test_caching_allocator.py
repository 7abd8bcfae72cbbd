"""The replay of torch's caching allocator: segments, best fit, splitting, merging and streams."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from everyrank.plan.caching_allocator import CachingAllocator, Replayed, replay

MIB = 2**20


def allocator_after(*requests: int, expandable: bool = False) -> CachingAllocator:
    """Return the allocator after requests of these sizes, with the keys 0, 1, 2, ..."""
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
        ((9 * MIB, 9 * MIB, 9 * MIB), 40 * MIB, 27 * MIB),  # 2 MiB of the first segment stay free, and 11 of the second
        ((10 * MIB,), 10 * MIB, 10 * MIB),
        ((11 * MIB + 1,), 12 * MIB, 12 * MIB),  # a remainder of less than 1 MiB is not split off
    ],
)
def test_segment_sizes(requests: tuple[int, ...], reserved: int, in_use: int) -> None:
    """Small requests share segments of 2 MiB, and medium requests share segments of 20 MiB."""
    allocator = allocator_after(*requests)
    assert (allocator.reserved, allocator.allocated) == (reserved, in_use)


def test_request_takes_the_smallest_block_that_fits() -> None:
    """The free blocks have 30, 16 and 12 MiB. Two requests of 15 MiB take the blocks of 16 and 30 MiB."""
    allocator = allocator_after(30 * MIB, 16 * MIB, 12 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate("a", 15 * MIB)
    assert allocator.allocated == 16 * MIB
    allocator.allocate("b", 15 * MIB)
    assert (allocator.allocated, allocator.reserved) == (31 * MIB, 58 * MIB)


def test_adjacent_free_blocks_are_merged() -> None:
    """The order of the frees does not matter. Blocks of different segments are not merged."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        allocator = allocator_after(6 * MIB, 6 * MIB, 6 * MIB)
        assert allocator.reserved == 20 * MIB
        for key in order:
            allocator.free(key)
        allocator.allocate("whole", 20 * MIB)
        assert allocator.reserved == 20 * MIB
    allocator = allocator_after(20 * MIB, 20 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate("larger", 40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_streams_do_not_share_blocks() -> None:
    """The second stream cannot take the block that the first stream has freed."""
    events = [(8 * MIB, 0, 0), (-8 * MIB, 0, 0), (8 * MIB, 1, 1)]
    assert replay(events).reserved == 40 * MIB
    assert replay([(size, key, 0) for size, key, _ in events]).reserved == 20 * MIB


def test_resized_storage_is_allocated_again() -> None:
    """FSDP2 resizes the storage of gathered parameters."""
    events = [(30 * MIB, 0, 0), (-30 * MIB, 0, 0), (20 * MIB, 1, 0), (30 * MIB, 0, 0)]
    assert replay(events).reserved == 60 * MIB


def test_peaks_of_sections() -> None:
    """Peaks count blocks, not requests. A block that is alive at the end of a section counts in both peaks."""
    events = [(12 * MIB, 0, 0), (12 * MIB, 1, 0), (-12 * MIB, 1, 0), (100, 2, 0)]
    assert replay(events, ends=(3,)) == Replayed((24 * MIB, 12 * MIB + 512), 26 * MIB)


def test_expandable_segments_grow() -> None:
    """They avoid gaps that no larger request fits in. Small and large requests stay separate."""
    request_sizes = [size * MIB for size in (20, 24, 28, 32)]
    events: list[tuple[int, int, int]] = []
    for key, size in enumerate(request_sizes):
        events += [(size, key, 0), (-size, key, 0)]
    assert replay(events).reserved == sum(request_sizes)
    assert replay(events, expandable_segments=True).reserved == 40 * MIB
    assert allocator_after(MIB, 30 * MIB, expandable=True).reserved == 42 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap(expandable: bool) -> None:
    """After thousands of requests each byte belongs to one block. At the end all bytes are free."""
    generator = random.Random(0)
    allocator, live_sizes = CachingAllocator(expandable), dict[int, int]()
    for key in range(3000):
        live_sizes[key] = generator.choice([generator.randrange(1, MIB), generator.randrange(MIB, 40 * MIB)])
        allocator.allocate(key, live_sizes[key], stream=generator.randrange(2))
        while len(live_sizes) > 30:
            freed_key = generator.choice(list(live_sizes))
            allocator.free(freed_key)
            del live_sizes[freed_key]
        if key % 500 == 0:
            blocks = sorted((block.address, block.size) for _, block in allocator._in_use.values())
            assert all(
                first_address + size <= second_address
                for (first_address, size), (second_address, _) in pairwise(blocks)
            )
        assert sum(live_sizes.values()) <= allocator.allocated <= allocator.reserved
    for key in live_sizes:
        allocator.free(key)
    free_sizes = [size for pool in allocator._pools.values() for size, _ in pool.order]
    assert allocator.allocated == 0
    assert sum(free_sizes) == allocator.reserved
    if expandable:
        assert len(free_sizes) == 4  # two streams, each with a small and a large pool


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not verified here: needs a GPU")
def test_replay_matches_the_allocator_of_a_gpu() -> None:
    """The same requests reserve the same bytes on a GPU."""
    torch.cuda.empty_cache()
    reserved_at_start, allocated_at_start = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    generator, allocator, live_tensors = random.Random(1), CachingAllocator(), dict[int, torch.Tensor]()
    for key in range(400):
        size = generator.choice([generator.randrange(1, MIB), generator.randrange(MIB, 40 * MIB)])
        live_tensors[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
        allocator.allocate(key, size)
        while len(live_tensors) > 12:
            freed_key = generator.choice(list(live_tensors))
            allocator.free(freed_key)
            del live_tensors[freed_key]
        assert torch.cuda.memory_allocated() - allocated_at_start == allocator.allocated
    assert torch.cuda.memory_reserved() - reserved_at_start == allocator.reserved
