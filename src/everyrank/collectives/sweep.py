"""What each rank does for `everyrank comm`: one operation after the other, one size after the other."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everyrank.collectives.algorithms import ALGORITHMS
from everyrank.collectives.operations import OPERATIONS, Call, Case, Operation
from everyrank.collectives.question import DTYPE_BYTES, REDUCING, CommOptions, size_text
from everyrank.launch import Launch, RankInfo
from everyrank.progress import progress
from everyrank.world import World, open_world, store_barrier
from everyrank.world.collectives import all_gather

__all__ = ["CommRow", "sweep_rank"]

_LEAST, _MOST = 5, 200  # calls of each operation at each size
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CommRow:
    """One operation at one size.

    backend, operation, algorithm, reduction, dtype, is_async, ranks (of each group)
    num_bytes                     of the largest tensor that a rank hands in, or gets; 0 for a barrier
    calls                         how often it was timed, after two calls that were not
    mean_, p50_, p99_seconds      of the slowest rank of each call, from a barrier on
    algorithm_, bus_bandwidth     bytes a second, by the definitions of the NCCL tests
    num_wrong                     elements that are not the right answer, over all ranks, after the first and last call
    steps, sent_bytes             of an algorithm: the most of any rank, by its theory
    refused                       what the backend said that does not offer it; then nothing was measured
    """

    backend: str
    operation: str
    algorithm: str | None
    reduction: str | None
    dtype: str
    is_async: bool
    ranks: int
    num_bytes: int
    calls: int = 0
    mean_seconds: float | None = None
    p50_seconds: float | None = None
    p99_seconds: float | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    num_wrong: int = 0
    steps: int | None = None
    sent_bytes: int | None = None
    refused: str | None = None


def sweep_rank(info: RankInfo, launch: Launch, options: CommOptions, show: bool) -> dict[str, Any]:
    """`rows`, the `CommRow`s as dicts, and what `world` they were measured in; the same on all ranks."""
    with open_world(info, launch) as world:
        group, rank, size = _own_group(world, options.group_size)
        asked = [name for name in options.asked_operations if size >= OPERATIONS[name].least_ranks]
        cases = [
            (name, num_bytes) for name in asked for num_bytes in (options.sizes if OPERATIONS[name].has_size else (0,))
        ]
        rows: list[CommRow] = []
        with progress(len(cases), show=show and world.rank == 0) as begin:
            for number, (name, num_bytes) in enumerate(cases):
                begin(f"{name} {size_text(num_bytes)}")
                case = _case(options, OPERATIONS[name], world, group, rank, size, num_bytes)
                rows.append(_row(world, options, name, case, number))
        return {
            "rows": [dataclasses.asdict(row) for row in rows],
            "world": {"size": world.size, "hosts": list(dict.fromkeys(world.hosts)), "device": str(world.device.type)}
            | {"threads": world.threads, "choices": dict(world.choices), "torch": torch.__version__},
        }


def _own_group(world: World, group_size: int | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """(the group, the rank in it, ranks of each group): neighbours are in one group."""
    if group_size is None or group_size == world.size:
        return world.group, world.rank, world.size
    members = [list(range(first, first + group_size)) for first in range(0, world.size, group_size)]
    group: Any = dist.new_subgroups_by_enumeration(members)[0]
    return group, world.rank % group_size, group_size


def _case(
    options: CommOptions,
    operation: Operation,
    world: World,
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    num_bytes: int,
) -> Case:
    step = operation.multiple(size)
    length = -(-max(1, num_bytes // DTYPE_BYTES[options.dtype]) // step) * step
    return Case(
        rank,
        size,
        group,
        length if operation.has_size else 0,
        _DTYPES.get(options.dtype) or getattr(torch, options.dtype),
        world.device,
        options.reduction,
        options.algorithm,
        options.is_async and operation.has_async,
    )


def _row(world: World, options: CommOptions, name: str, case: Case, number: int) -> CommRow:
    operation = OPERATIONS[name]
    num_bytes = case.length * case.dtype.itemsize
    row = CommRow(
        world.backend,
        name,
        case.algorithm,
        case.reduction if name in REDUCING else None,
        options.dtype,
        case.is_async,
        case.size,
        num_bytes,
    )
    if case.algorithm is not None:
        traffic = [ALGORITHMS[case.algorithm].traffic(rank, case.size, case.length) for rank in range(case.size)]
        sent = max(one.num_elements for one in traffic) * case.dtype.itemsize
        row = dataclasses.replace(row, steps=max(one.num_steps for one in traffic), sent_bytes=sent)
    call = operation.make(case)
    refused = _first_call(call)
    store_barrier(world, f"comm/{number}")  # who was refused has said so
    if refused:
        return dataclasses.replace(row, refused=refused)
    wrong = call.wrong()
    times = _times(world, case, call, options.seconds)
    wrong += call.wrong()
    seconds = all_gather(torch.tensor(times, dtype=torch.float64), world)
    slowest = torch.stack(seconds).amax(0)
    num_wrong = int(sum(int(one) for one in all_gather(torch.tensor([wrong]), world)))
    mean = float(slowest.mean())
    has_rate = operation.has_size
    return dataclasses.replace(
        row,
        calls=len(times),
        mean_seconds=mean,
        p50_seconds=float(slowest.quantile(0.5)),
        p99_seconds=float(slowest.quantile(0.99)),
        algorithm_bandwidth=num_bytes / mean if has_rate else None,
        bus_bandwidth=num_bytes / mean * operation.bus_factor(case.size) if has_rate else None,
        num_wrong=num_wrong,
    )


def _first_call(call: Call) -> str | None:
    """What a backend says that does not offer the operation, or this dtype; all ranks are told the same."""
    call.reset()
    try:
        call.run()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0][:200]
    return None


def _times(world: World, case: Case, call: Call, seconds: float) -> list[float]:
    """Seconds of each call on this rank. As many on all ranks: as fit into `seconds` on the slowest."""
    warm = _timed(world, case, call)
    slowest = max(float(one) for one in all_gather(torch.tensor([warm], dtype=torch.float64), world))
    count = min(_MOST, max(_LEAST, int(seconds / slowest)))
    return [_timed(world, case, call) for _ in range(count)]


def _timed(world: World, case: Case, call: Call) -> float:
    call.reset()
    dist.barrier(group=case.group)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    begun = time.perf_counter()
    call.run()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - begun
