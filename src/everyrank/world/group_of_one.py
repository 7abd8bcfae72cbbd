"""A default process group with only this rank, for what one rank does alone inside of a larger world.

Model code may call collectives of its own: `if dist.is_initialized(): dist.all_reduce(counts)`, as a codebook or a
metric does. Where one rank runs `single` the others do not come to such a call. Inside `group_of_one` it finds a world
of one: `dist.get_world_size()` is 1, and a sum over all ranks is this rank's own.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from everyrank.world.world import World

__all__ = ["group_of_one"]


@contextlib.contextmanager
def group_of_one(world: World) -> Generator[None]:
    """While this rank works alone: torch's default process group is one with only this rank.

    Does nothing in a world of several ranks, and where the default group has one rank already. The group is made once
    in a world; making it waits for no other rank.
    """
    if world.group is not None or world.size != 1 or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    internals: Any = distributed_c10d
    before = dist.group.WORLD
    cache = world.group_cache
    if cache.alone is None:
        make: Any = dist.new_group
        cache.alone = make(
            [dist.get_rank()],
            timeout=datetime.timedelta(seconds=world.timeout_seconds),
            # nccl and mpi make a group out of their default group, to which all ranks have to come
            backend="shm" if world.backend == "shm" else "gloo",
            use_local_synchronization=True,
        )
    internals._update_default_pg(cache.alone)
    try:
        yield
    finally:
        internals._update_default_pg(before)
