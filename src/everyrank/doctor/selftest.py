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
from everyrank.errors import describe
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
    """Return the difference to rank 0's clock, from the fastest of five broadcasts of its time (as NTP does)."""
    exchanges: list[tuple[float, float]] = []
    for _ in range(5):
        dist.barrier(group=world.group)
        sent_at = time.time()
        clock = torch.tensor([time.time()], dtype=torch.float64, device=world.device)
        dist.broadcast(clock, src=0, group=world.group)
        received_at = time.time()
        exchanges.append((received_at - sent_at, received_at - float(clock[0])))
    shortest_seconds, skew = min(exchanges)
    return 0.0 if world.rank == 0 else skew - shortest_seconds / 2


def _wrong_answers(world: World, length: int) -> list[str]:
    """Return the wrong results. Rank r passes (r + 1) * [0, 1, 2, ...]: small integers, so that results are exact."""
    ramp = torch.arange(length, device=world.device, dtype=torch.float32) % 1024
    rank_values = ramp * (world.rank + 1)
    sum_factor = world.size * (world.size + 1) / 2
    wrong_results: list[str] = []
    for name, operation, factor in (
        ("sum", dist.ReduceOp.SUM, sum_factor),
        # with gloo, some versions of torch return the sum for AVG (pytorch#162338)
        ("average", dist.ReduceOp.AVG, sum_factor / world.size),
        ("maximum", dist.ReduceOp.MAX, world.size),
    ):
        result = rank_values.clone()
        dist.all_reduce(result, op=operation, group=world.group)
        if not torch.equal(result, ramp * factor):
            index = int((result != ramp * factor).nonzero()[0])
            wrong_results.append(
                f"all-reduce {name} of {length} numbers: element {index} is {float(result[index]):g}, "
                f"not {float(ramp[index] * factor):g}"
            )
    rows = [torch.empty_like(rank_values) for _ in range(world.size)]
    dist.all_gather(rows, rank_values, group=world.group)
    if not all(torch.equal(row, ramp * (rank + 1)) for rank, row in enumerate(rows)):
        wrong_results.append(f"all-gather of {length} numbers")
    broadcast = rank_values.clone()
    dist.broadcast(broadcast, src=0, group=world.group)
    if not torch.equal(broadcast, ramp):
        wrong_results.append(f"broadcast of {length} numbers")
    return wrong_results


def _torch_facts() -> dict[str, Any]:
    """Return the features of this build of torch, and its devices, or why CUDA cannot be used."""
    devices: list[dict[str, Any]] = []
    cuda_error = ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    except RuntimeError as error:  # torch counts devices even if the driver is too old for this build
        devices, cuda_error = [], describe(error)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cuda_error": cuda_error,
        "backends": {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi", "ucc")},
        "rpc": [backend.name for backend in rpc.BackendType] if rpc.is_available() else [],
    }
