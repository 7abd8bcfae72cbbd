"""What the links between ranks give: collectives timed and checked, on one backend or on several in turns."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import torch
import torch.distributed as dist

from everyrank.backends import register_backend
from everyrank.collectives.operations import OPERATIONS
from everyrank.collectives.options import CommOptions, size_text
from everyrank.collectives.stride_check import check_strides
from everyrank.collectives.sweep import copy_rate, sweep
from everyrank.errors import CannotRunError
from everyrank.launch import Launch, RankInfo
from everyrank.measure.memory import free_memory_bytes
from everyrank.measure.provenance import machine
from everyrank.world import World, open_world, start_horovod
from everyrank.world.world import choose_backend

__all__ = ["comm_rank", "needed_bytes"]


def comm_rank(info: RankInfo, launch: Launch, options: CommOptions, show: bool) -> dict[str, Any]:
    """`rows` (`CommRow`) and `strides` (`StridesRow`) as dicts, a plain `copy`, and in what `world`, on what `machine`.

    The same on all ranks. Raises `CannotRunError` where the tensors do not fit into memory.
    """
    with open_world(info, launch) as world:
        _check_memory(world, options)
        groups = _groups(world, options)
        rows = sweep(world, groups, options, show and world.rank == 0)
        strides = check_strides(world, groups, options)
        largest = max(options.sizes)
        return {
            "rows": [dataclasses.asdict(row) for row in rows],
            "strides": [dataclasses.asdict(row) for row in strides],
            "copy": {"num_bytes": largest, "bytes_per_second": copy_rate(world, largest)},
            "world": {"size": world.size, "device": world.device.type, "backends": list(groups)},
            "machine": machine(world),
        }


def _groups(world: World, options: CommOptions) -> dict[str, dist.ProcessGroup]:
    """By the name of each backend this rank's group; neighbours are in one group. A collective of all ranks."""
    assert world.group is not None
    size = options.group_size or world.size
    members = [list(range(first, first + size)) for first in range(0, world.size, size)]
    # open_world has seen whether ranks share devices: then it is gloo, unless that was asked for
    num_cuda = torch.cuda.device_count() if world.backend == "gloo" else world.local_size
    groups: dict[str, dist.ProcessGroup] = {}
    for requested in options.backends or (world.backend,):
        name, _ = choose_backend(requested, world.device.type, world.local_size, num_cuda)
        if name == world.backend and size == world.size:
            groups[name] = world.group
        else:
            if name == "horovod":
                start_horovod(world)
            timeout = datetime.timedelta(seconds=world.timeout_seconds)
            subgroup: Any = dist.new_subgroups_by_enumeration(members, timeout, register_backend(name))[0]
            groups[name] = subgroup
    return groups


def _check_memory(world: World, options: CommOptions) -> None:
    """Before any tensor is made: a rank that the system ends says nothing of sizes."""
    largest = max(options.sizes)
    needed = needed_bytes(options, largest, world.size) * world.local_size
    free = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else free_memory_bytes()
    if free is not None and needed > free:
        where = f"the {world.local_size} ranks of a host" if world.local_size > 1 else "a rank"
        raise CannotRunError(
            f"--sizes {size_text(largest).replace(' ', '')}: {where} need about {needed / 2**30:,.1f} GiB for it, and "
            f"{free / 2**30:,.1f} GiB are free; give smaller --sizes"
        )


def needed_bytes(options: CommOptions, num_bytes: int, world_size: int) -> int:
    """About how much memory a rank needs at most for a size.

    Of each backend and algorithm that takes turns the tensor, what is put back into it and the right answer; and once
    what the comparison and the backend need. An object is held by its sender, in its pickle, and by each rank that
    gets it, there with its pickle and with what is expected.
    """
    ranks = options.group_size or world_size
    carries_objects = any(
        not OPERATIONS[name].has_tensors and OPERATIONS[name].has_size for name in options.asked_operations
    )
    held = 2 + 2 * ranks if carries_objects else 3
    return num_bytes * (held * max(1, len(options.backends)) * len(options.asked_algorithms) + 2)
