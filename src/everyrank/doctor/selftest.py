"""Runs in ranks of `doctor`: which devices torch sees, and whether the collectives of each backend are correct."""

from __future__ import annotations

import json
import os
import platform
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from everyrank._version import __version__
from everyrank.launch import Launch, RankInfo
from everyrank.launch.host_info import host_name
from everyrank.world import World, open_world, store_barrier

__all__ = ["introduce_rank", "selftest_rank"]

_LENGTHS = (3, 262_144)  # 12 bytes and 1 MiB


def selftest_rank(info: RankInfo, launch: Launch) -> dict[str, Any]:
    """Return the facts about `torch` and the `wrong` collectives of this rank."""
    with open_world(info, launch) as world:
        wrong = [text for length in _LENGTHS for text in _wrong_answers(world, length)]
        return {"backend": world.backend, "device": str(world.device), "torch": _torch_facts(), "wrong": wrong}


def introduce_rank(info: RankInfo, launch: Launch) -> list[dict[str, Any]]:
    """Return host, process, device and clock skew (`skew_seconds`, to rank 0) of each rank; [] except on rank 0."""
    with open_world(info, launch) as world:
        introduction: dict[str, Any] = {
            "rank": world.rank,
            "host": host_name(),
            "pid": os.getpid(),
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "device": str(world.device),
            "choices": dict(world.choices),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "everyrank": __version__,
            "skew_seconds": _clock_skew(world),
        }
        world.store.set(f"introduced/{world.rank}", json.dumps(introduction))
        store_barrier(world, "looked at")
        if world.rank != 0:
            return []
        return [json.loads(world.store.get(f"introduced/{rank}")) for rank in range(world.size)]


def _clock_skew(world: World) -> float:
    """Return the difference to the clock of rank 0, from the fastest of five broadcasts of its time (as NTP does)."""
    exchanges: list[tuple[float, float]] = []
    for _ in range(5):
        dist.barrier(group=world.group)
        sent = time.time()
        clock = torch.tensor([time.time()], dtype=torch.float64, device=world.device)
        dist.broadcast(clock, src=0, group=world.group)
        received = time.time()
        exchanges.append((received - sent, received - float(clock[0])))
    quickest, skew = min(exchanges)
    return 0.0 if world.rank == 0 else skew - quickest / 2


def _wrong_answers(world: World, length: int) -> list[str]:
    """Return the wrong results. Rank r passes (r + 1) * [0, 1, 2, ...]: small integers, so that results are exact."""
    ramp = torch.arange(length, device=world.device, dtype=torch.float32) % 1024
    local = ramp * (world.rank + 1)
    total = world.size * (world.size + 1) / 2
    wrong: list[str] = []
    for name, operation, factor in (
        ("sum", dist.ReduceOp.SUM, total),
        # with gloo, some versions of torch return the sum for AVG (pytorch#162338)
        ("average", dist.ReduceOp.AVG, total / world.size),
        ("maximum", dist.ReduceOp.MAX, world.size),
    ):
        result = local.clone()
        dist.all_reduce(result, op=operation, group=world.group)
        if not torch.equal(result, ramp * factor):
            index = int((result != ramp * factor).nonzero()[0])
            wrong.append(
                f"all-reduce {name} of {length} numbers: element {index} is {float(result[index]):g}, "
                f"not {float(ramp[index] * factor):g}"
            )
    rows = [torch.empty_like(local) for _ in range(world.size)]
    dist.all_gather(rows, local, group=world.group)
    if not all(torch.equal(row, ramp * (rank + 1)) for rank, row in enumerate(rows)):
        wrong.append(f"all-gather of {length} numbers")
    sent = local.clone()
    dist.broadcast(sent, src=0, group=world.group)
    if not torch.equal(sent, ramp):
        wrong.append(f"broadcast of {length} numbers")
    return wrong


def _torch_facts() -> dict[str, Any]:
    """Return the features of this build of torch, and its devices."""
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "backends": {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi", "ucc")},
        "rpc": [backend.name for backend in rpc.BackendType] if rpc.is_available() else [],
    }
