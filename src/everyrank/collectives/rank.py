"""The part of one rank in `everyrank comm`: it times and checks collectives, on one backend or several in turns."""

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
    """Return `rows` (`CommRow`) and `strides` (`StridesRow`) as dicts, the speed of a `copy`, `world` and `machine`.

    Equal on all ranks. Raises `CannotRunError` if the tensors do not fit in memory.
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
    """Return this rank's group for each backend; a group has consecutive ranks. A collective."""
    assert world.group is not None
    size = options.group_size or world.size
    members = [list(range(first, first + size)) for first in range(0, world.size, size)]
    # open_world chose gloo if ranks share a device
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
    """Check memory before any tensor is allocated, because a rank that the OOM killer ends prints no error."""
    largest = max(options.sizes)
    needed_memory = needed_bytes(options, largest, world.size) * world.local_size
    free = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else free_memory_bytes()
    if free is not None and needed_memory > free:
        subject = f"the {world.local_size} ranks of a host" if world.local_size > 1 else "a rank"
        raise CannotRunError(
            f"--sizes {size_text(largest).replace(' ', '')}: {subject} need about "
            f"{needed_memory / 2**30:,.1f} GiB for this size, but "
            f"{free / 2**30:,.1f} GiB are free; give smaller --sizes"
        )


def needed_bytes(options: CommOptions, num_bytes: int, world_size: int) -> int:
    """Return an estimate of the peak memory of a rank for a size.

    Each backend and algorithm has the tensor, its initial values and the expected result. The comparison and the
    backend need two more. An object exists on its sender and in its pickle, and on each receiver with its pickle and
    the expected object.
    """
    ranks = options.group_size or world_size
    carries_objects = any(
        not OPERATIONS[name].has_tensors and OPERATIONS[name].has_size for name in options.tested_operations
    )
    num_copies = 2 + 2 * ranks if carries_objects else 3
    return num_bytes * (num_copies * max(1, len(options.backends)) * len(options.tested_algorithms) + 2)
