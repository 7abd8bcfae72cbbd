"""A default process group with only this rank, while one rank works without the others.

A model may call collectives itself, for example `if dist.is_initialized(): dist.all_reduce(counts)` in a codebook or a
metric. While rank 0 runs `single`, the other ranks do not join such a call, and it would hang. Inside `group_of_one`,
`dist.get_world_size()` is 1 and the all-reduce returns the local value.
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


def group_of_one(world: World) -> contextlib.AbstractContextManager[None]:
    """Replace torch's default process group by one with only this rank, until the block ends.

    Does nothing in a world of several ranks, or if the default group already has one rank. The group is made once
    in a world, without waiting for other ranks.
    """
    default_group = dist.group.WORLD if world.group is None and world.size == 1 else None
    if default_group is None or default_group.size() == 1:
        return contextlib.nullcontext()
    return _replace_default_group(default_group, world)


@contextlib.contextmanager
def _replace_default_group(default_group: dist.ProcessGroup, world: World) -> Generator[None]:
    internals: Any = distributed_c10d
    cache = world.group_cache
    if cache.alone is None:
        make: Any = dist.new_group
        cache.alone = make(
            [dist.get_rank()],
            timeout=datetime.timedelta(seconds=world.timeout_seconds),
            # nccl and mpi split their default group, which is a collective of all ranks
            backend="shm" if world.backend == "shm" else "gloo",
            use_local_synchronization=True,
        )
    internals._update_default_pg(cache.alone)
    try:
        yield
    finally:
        internals._update_default_pg(default_group)
