"""Times and checks every operation at every size; several backends and algorithms take turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.collectives.algorithms import ALGORITHMS
from everyrank.collectives.operations import OPERATIONS, Call, Case, Operation
from everyrank.collectives.options import DTYPE_BYTES, REDUCING, CommOptions, size_text
from everyrank.errors import CannotRunError, UsageError, describe
from everyrank.progress import progress
from everyrank.world import World
from everyrank.world.collectives import all_gather, all_gather_json

__all__ = ["TORCH_DTYPES", "CommRow", "copy_rate", "refusal", "sweep"]

_MIN_CALLS, _MAX_CALLS = 5, 200  # per operation and size; _MIN_CALLS is also the number of calls in a turn
TORCH_DTYPES = {name: getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(name, name)) for name in DTYPE_BYTES}
"""By the names of `everyrank comm --dtype`."""


@dataclass(frozen=True)
class CommRow:
    """The result of one operation at one size, with one backend and algorithm.

    backend, operation, algorithm, reduction, dtype, is_async, ranks (of each group)
    num_bytes                     bytes of the largest input or output tensor of a rank; 0 for a barrier
    calls                         number of timed calls
    mean_, p50_, p99_seconds      time from the start of the last rank to the end of the last rank (`_seconds`)
    mean_speedup, p50_speedup     time of the first backend / time of this one; None for the first
    algorithm_, bus_bandwidth     bytes per second, as defined by the NCCL tests
    num_wrong                     wrong elements over all ranks, after the first and the last call
    steps, sent_bytes             of an algorithm: the maximum over ranks, by its theory
    refused                       error message of a backend that does not support it; then nothing was measured
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
    mean_speedup: float | None = None
    p50_speedup: float | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    num_wrong: int = 0
    steps: int | None = None
    sent_bytes: int | None = None
    refused: str | None = None


class _Candidate(NamedTuple):
    """A backend and algorithm that takes turns with others."""

    row: CommRow
    case: Case
    call: Call


def sweep(
    world: World, groups: Mapping[str, dist.ProcessGroup], options: CommOptions, show: bool = False
) -> list[CommRow]:
    """Return a row for each operation, size, backend in `groups`, and algorithm; equal on all ranks.

    Operations that need more ranks are left out. Raises `UsageError` if one of them was requested by name.

    Candidates take turns of a few calls in the same processes, and a different one starts each round, so that a slow
    phase of the machine affects all of them. Separate launches would compare different moments and different placements
    of processes on cores. Turns of one call would measure each candidate while threads of the previous one still run.
    """
    size = dist.get_world_size(next(iter(groups.values())))
    for name in options.operations:
        if size < OPERATIONS[name].least_ranks:
            least = OPERATIONS[name].least_ranks
            raise UsageError(f"--op {name}: needs {least} ranks in a group; give --processes {least}, or more")
    operations = [name for name in options.tested_operations if size >= OPERATIONS[name].least_ranks]
    cases = [
        (name, num_bytes) for name in operations for num_bytes in (options.sizes if OPERATIONS[name].has_size else (0,))
    ]
    rows: list[CommRow] = []
    with progress(len(cases), show=show) as advance:
        for name, num_bytes in cases:
            advance(f"{name} {size_text(num_bytes)}")
            candidates = [
                _candidate(world, options, name, num_bytes, backend, group, algorithm)
                for backend, group in groups.items()
                for algorithm in options.tested_algorithms
            ]
            try:
                rows += _measure(world, candidates, options.seconds)
            except RuntimeError as error:  # a backend that fails in this call, or in the gather after it
                raise CannotRunError(f"{name} {size_text(num_bytes)}: {describe(error)}") from error
    return rows


def _candidate(
    world: World,
    options: CommOptions,
    name: str,
    num_bytes: int,
    backend: str,
    group: dist.ProcessGroup,
    algorithm: str | None,
) -> _Candidate:
    operation, rank, size = OPERATIONS[name], dist.get_rank(group), dist.get_world_size(group)
    step = operation.multiple(size)
    length = -(-max(1, num_bytes // DTYPE_BYTES[options.dtype]) // step) * step if operation.has_size else 0
    is_async = options.is_async and operation.has_async
    case = Case(
        rank, size, group, length, TORCH_DTYPES[options.dtype], world.device, options.reduction, algorithm, is_async
    )
    reduction = options.reduction if name in REDUCING else None
    row = CommRow(
        backend, name, algorithm, reduction, options.dtype, is_async, size, length * DTYPE_BYTES[options.dtype]
    )
    if algorithm is not None:
        traffic = [ALGORITHMS[algorithm].traffic(group_rank, size, length) for group_rank in range(size)]
        sent = max(rank_traffic.num_elements for rank_traffic in traffic) * DTYPE_BYTES[options.dtype]
        row = dataclasses.replace(row, steps=max(rank_traffic.num_steps for rank_traffic in traffic), sent_bytes=sent)
    return _Candidate(row, case, operation.make(case))


def _measure(world: World, candidates: Sequence[_Candidate], seconds: float) -> list[CommRow]:
    """Return the rows of the candidates, with their times or the error message."""
    refused = [refusal(world, candidate.call) for candidate in candidates]
    supported = [candidate for candidate, message in zip(candidates, refused, strict=True) if message is None]
    if not supported:
        return [
            dataclasses.replace(candidate.row, refused=message)
            for candidate, message in zip(candidates, refused, strict=True)
        ]
    wrong = torch.tensor([candidate.call.wrong() for candidate in supported])
    times = _times(world, supported, seconds)
    wrong += torch.tensor([candidate.call.wrong() for candidate in supported])
    num_wrong = torch.stack(all_gather(wrong, world)).sum(0).tolist()
    rows = iter(
        [
            _with_measurements(candidate, row, count)
            for candidate, row, count in zip(supported, times, num_wrong, strict=True)
        ]
    )
    rows = [
        next(rows) if message is None else dataclasses.replace(candidate.row, refused=message)
        for candidate, message in zip(candidates, refused, strict=True)
    ]
    return [rows[0], *(_with_speedup(row, rows[0]) for row in rows[1:])]


def refusal(world: World, call: Call) -> str | None:
    """Call the operation once; return the error message if it is not supported, else None. Equal on all ranks."""
    call.reset()
    message = None
    try:
        call.run()
    except (RuntimeError, ValueError, TypeError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return next(filter(None, all_gather_json(message, world.group)), None)


def _times(world: World, candidates: Sequence[_Candidate], seconds: float) -> Tensor:
    """Time calls for `seconds` for each candidate; return seconds, shape (candidates, calls), equal on all ranks."""
    first = _seconds(world, _rounds(world, candidates, 1))
    round_seconds = float(first.median(0).values.sum()) * _MIN_CALLS  # a single call may have waited for a core
    num_rounds = min(_MAX_CALLS // _MIN_CALLS, int(seconds * len(candidates) / round_seconds)) - 1
    return torch.cat([first, _seconds(world, _rounds(world, candidates, num_rounds))] if num_rounds > 0 else [first]).T


def _rounds(world: World, candidates: Sequence[_Candidate], count: int) -> Tensor:
    """Return start and end of calls on this rank, shape (calls, candidates, 2), `_MIN_CALLS` per candidate and round.

    A different candidate starts each round. The first call of each turn is not counted.
    """
    rounds: list[Tensor] = []
    for number in range(count):
        spans: dict[int, list[tuple[float, float]]] = {}
        for turn in range(len(candidates)):
            index = (number + turn) % len(candidates)
            _timed(world, candidates[index])
            spans[index] = [_timed(world, candidates[index]) for _ in range(_MIN_CALLS)]
        rounds.append(torch.tensor([spans[index] for index in range(len(candidates))], dtype=torch.float64))
    return torch.cat(rounds, dim=1).transpose(0, 1).contiguous()


def _seconds(world: World, spans: Tensor) -> Tensor:
    """Return the seconds of each call from this rank's (start, end): shape (..., 2) -> (...).

    Ranks leave the barrier before a call at different times, which depend on the backend. So a call lasts from the
    start of the last rank to the end of the last rank, by the shared clock of the host. Hosts have different
    clocks: with several hosts it is the time of the slowest rank, which includes its wait for the others.
    """
    starts, ends = torch.stack([rank_spans.view_as(spans) for rank_spans in all_gather(spans, world)]).unbind(-1)
    if len(set(world.hosts)) <= 1:
        return ends.amax(0) - starts.amax(0)
    return (ends - starts).amax(0)


def _timed(world: World, candidate: _Candidate) -> tuple[float, float]:
    """Return start and end of a call on this rank."""
    candidate.call.reset()
    dist.barrier(group=candidate.case.group)
    start = _now(world)
    candidate.call.run()
    return start, _now(world)


def _now(world: World) -> float:
    """Return the time in seconds, after synchronising the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


def _with_measurements(candidate: _Candidate, times: Tensor, num_wrong: int) -> CommRow:
    operation: Operation = OPERATIONS[candidate.row.operation]
    mean = float(times.mean())
    rate = candidate.row.num_bytes / mean if operation.has_size else None
    return dataclasses.replace(
        candidate.row,
        calls=len(times),
        mean_seconds=mean,
        p50_seconds=float(times.quantile(0.5)),
        p99_seconds=float(times.quantile(0.99)),
        algorithm_bandwidth=rate,
        bus_bandwidth=None if rate is None else rate * operation.bus_factor(candidate.case.size),
        num_wrong=num_wrong,
    )


def _with_speedup(row: CommRow, first: CommRow) -> CommRow:
    """Return the row with its speed-up relative to the first."""
    mean, p50 = (_ratio(getattr(first, name), getattr(row, name)) for name in ("mean_seconds", "p50_seconds"))
    return dataclasses.replace(row, mean_speedup=mean, p50_speedup=p50)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def copy_rate(world: World, num_bytes: int) -> float:
    """Return the bytes per second of a memory copy on all ranks at once, on the slowest rank: an upper bound."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(_MIN_CALLS + 1):
        dist.barrier(group=world.group)
        start = _now(world)
        target.copy_(source)
        times.append(_now(world) - start)
    slowest = torch.stack(all_gather(torch.tensor(times[1:], dtype=torch.float64), world)).amax(0)
    return num_bytes / float(slowest.median())
