"""Every operation timed and checked at every size, by several backends and algorithms in turns."""

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
from everyrank.progress import progress
from everyrank.world import World
from everyrank.world.collectives import all_gather, all_gather_json

__all__ = ["TORCH_DTYPES", "CommRow", "copy_rate", "refusal", "sweep"]

_LEAST, _MOST = 5, 200  # calls of each operation at each size; the first is also how many calls a turn has
TORCH_DTYPES = {name: getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(name, name)) for name in DTYPE_BYTES}
"""By the names of `everyrank comm --dtype`."""


@dataclass(frozen=True)
class CommRow:
    """One operation at one size, by one backend and algorithm.

    backend, operation, algorithm, reduction, dtype, is_async, ranks (of each group)
    num_bytes                     of the largest tensor that a rank hands in, or gets; 0 for a barrier
    calls                         how often it was timed
    mean_, p50_, p99_seconds      from when the last rank begins until the last one is done (`_seconds`)
    mean_speedup, p50_speedup     these times of the first backend's own way / of this one; None for the first itself
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
    mean_speedup: float | None = None
    p50_speedup: float | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    num_wrong: int = 0
    steps: int | None = None
    sent_bytes: int | None = None
    refused: str | None = None


class _Candidate(NamedTuple):
    """One of those that take turns."""

    row: CommRow
    case: Case
    call: Call


def sweep(
    world: World, groups: Mapping[str, dist.ProcessGroup], options: CommOptions, show: bool = False
) -> list[CommRow]:
    """The same rows on all ranks: of each operation and size one for each backend of `groups` and each algorithm.

    These take turns after a few calls each, in the same processes, on tensors of the same kind, and another one begins
    each round: what slows the machine down for a while slows all of them, and nobody always follows the same other. One
    start for each backend would compare two moments, and two placements of processes on cores; turns call by call would
    time each in the wake of the other's threads, which no training does.
    """
    size = dist.get_world_size(next(iter(groups.values())))
    operations = [name for name in options.asked_operations if size >= OPERATIONS[name].least_ranks]
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
                for algorithm in options.asked_algorithms
            ]
            rows += _measured(world, candidates, options.seconds)
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
        traffic = [ALGORITHMS[algorithm].traffic(each, size, length) for each in range(size)]
        sent = max(rank_traffic.num_elements for rank_traffic in traffic) * DTYPE_BYTES[options.dtype]
        row = dataclasses.replace(row, steps=max(rank_traffic.num_steps for rank_traffic in traffic), sent_bytes=sent)
    return _Candidate(row, case, operation.make(case))


def _measured(world: World, candidates: Sequence[_Candidate], seconds: float) -> list[CommRow]:
    """The rows of these with their times, or why there are none."""
    refused = [refusal(world, candidate.call) for candidate in candidates]
    here = [candidate for candidate, words in zip(candidates, refused, strict=True) if words is None]
    if not here:
        return [
            dataclasses.replace(candidate.row, refused=words)
            for candidate, words in zip(candidates, refused, strict=True)
        ]
    wrong = torch.tensor([candidate.call.wrong() for candidate in here])
    times = _times(world, here, seconds)
    wrong += torch.tensor([candidate.call.wrong() for candidate in here])
    num_wrong = torch.stack(all_gather(wrong, world)).sum(0).tolist()
    rows = iter([_filled(candidate, row, count) for candidate, row, count in zip(here, times, num_wrong, strict=True)])
    rows = [
        next(rows) if words is None else dataclasses.replace(candidate.row, refused=words)
        for candidate, words in zip(candidates, refused, strict=True)
    ]
    return [rows[0], *(_beside(row, rows[0]) for row in rows[1:])]


def refusal(world: World, call: Call) -> str | None:
    """Call it once. What the backend says that does not offer it, or this dtype; the same on all ranks."""
    call.reset()
    words = None
    try:
        call.run()
    except (RuntimeError, ValueError, TypeError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return next(filter(None, all_gather_json(words, world.group)), None)


def _times(world: World, candidates: Sequence[_Candidate], seconds: float) -> Tensor:
    """Time calls for `seconds` for each candidate; return seconds, shape (candidates, calls), equal on all ranks."""
    first = _seconds(world, _rounds(world, candidates, 1))
    round_seconds = float(first.median(0).values.sum()) * _LEAST  # one call alone may have waited for a core
    more = min(_MOST // _LEAST, int(seconds * len(candidates) / round_seconds)) - 1
    return torch.cat([first, _seconds(world, _rounds(world, candidates, more))] if more > 0 else [first]).T


def _rounds(world: World, candidates: Sequence[_Candidate], count: int) -> Tensor:
    """When calls begin and end on this rank, shape (calls, candidates, 2), `_LEAST` of each candidate in a round.

    Another candidate is the first one in each round; the first call after those of another is not counted.
    """
    rounds: list[Tensor] = []
    for number in range(count):
        spans: dict[int, list[tuple[float, float]]] = {}
        for turn in range(len(candidates)):
            index = (number + turn) % len(candidates)
            _timed(world, candidates[index])
            spans[index] = [_timed(world, candidates[index]) for _ in range(_LEAST)]
        rounds.append(torch.tensor([spans[index] for index in range(len(candidates))], dtype=torch.float64))
    return torch.cat(rounds, dim=1).transpose(0, 1).contiguous()


def _seconds(world: World, spans: Tensor) -> Tensor:
    """What a call takes, from this rank's (begin, end) of each: shape (..., 2) -> (...).

    Ranks leave the barrier before a call at different times, those of some backends more so than of others. So it is
    from when the last rank begins to when the last one is done, by the clock that the processes of a host share. Clocks
    of several hosts differ: there it is what the slowest rank takes, which counts the wait for the others.
    """
    begins, ends = torch.stack([each.view_as(spans) for each in all_gather(spans, world)]).unbind(-1)
    if len(set(world.hosts)) <= 1:
        return ends.amax(0) - begins.amax(0)
    return (ends - begins).amax(0)


def _timed(world: World, candidate: _Candidate) -> tuple[float, float]:
    """When a call begins and ends on this rank."""
    candidate.call.reset()
    dist.barrier(group=candidate.case.group)
    begun = _now(world)
    candidate.call.run()
    return begun, _now(world)


def _now(world: World) -> float:
    """Seconds, once the device has done all it was given."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


def _filled(candidate: _Candidate, times: Tensor, num_wrong: int) -> CommRow:
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


def _beside(row: CommRow, first: CommRow) -> CommRow:
    """The row with how many times as fast as the first it is."""
    mean, p50 = (_ratio(getattr(first, name), getattr(row, name)) for name in ("mean_seconds", "p50_seconds"))
    return dataclasses.replace(row, mean_speedup=mean, p50_speedup=p50)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def copy_rate(world: World, num_bytes: int) -> float:
    """Bytes a second of a plain copy on every rank at once, the slowest of them: what a bandwidth is a share of."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(_LEAST + 1):
        dist.barrier(group=world.group)
        begun = _now(world)
        target.copy_(source)
        times.append(_now(world) - begun)
    slowest = torch.stack(all_gather(torch.tensor(times[1:], dtype=torch.float64), world)).amax(0)
    return num_bytes / float(slowest.median())
