"""Step-time breakdown: data loading, forward, backward, optimizer, and the exposed communication in them.

`phases` reads a clock at each border of two phases, which takes a microsecond; the phases add up to the step.
On CUDA the clock is an event in the stream, so nothing waits.

`exposed_shares` runs a few updates under torch.profiler. Communication is exposed while a collective runs and this rank
computes nothing. On CUDA the kernels show both. On CPU the profile of gloo's threads shows when a collective runs, and
a gap between two operators that is longer than Python needs shows an idle rank. everyrank's backends run in the rank's
thread, so the whole call is communication. For Horovod it is the wait for its thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

import torch
from torch.profiler import record_function

from everyrank.backends import OWN_BACKENDS
from everyrank.measure.clock import interval
from everyrank.measure.profiling import events_of, profiler
from everyrank.parallel.trainable import Trainable
from everyrank.record import Breakdown

__all__ = ["PHASES", "breakdown", "exposed_shares", "marked_phases", "phases"]

PHASES = ("data", "forward", "backward", "optimizer")

_MAX_GAP_US = 30.0  # between two operators of one thread: longer than Python needs, shorter than any collective
_MARK = "everyrank:"
_OWN_CALLS = tuple(f"{name}:" for name in OWN_BACKENDS)
_ON_CUDA = ("kernel", "gpu_memcpy", "gpu_memset")


def phases(trainable: Trainable, updates: Iterable[Any], device: torch.device) -> list[dict[str, float]]:
    """Run `updates` to the end; return the seconds of each phase for each update."""
    rows: list[list[tuple[str, Any]]] = []
    read = _stream_event if device.type == "cuda" else time.perf_counter

    def enter(phase: str) -> None:
        if rows[-1][-1][0] != phase:
            rows[-1].append((phase, read()))

    with _observed(trainable, enter):
        iterator = iter(updates)
        while True:
            rows.append([("data", read())])
            if next(iterator, None) is None:
                break
            rows[-1].append(("end", read()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [_durations(row) for row in rows[:-1]]


@contextlib.contextmanager
def _observed(trainable: Trainable, enter: Callable[[str], None]) -> Generator[None]:
    """Call `enter` with forward, backward or optimizer whenever a step enters that phase."""
    trainable.phase_observers.append(enter)
    try:
        yield
    finally:
        trainable.phase_observers.remove(enter)


def _stream_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _durations(row: list[tuple[str, Any]]) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for (phase, start), (_, end) in itertools.pairwise(row):
        seconds[phase] += start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start
    return seconds


def exposed_shares(trainable: Trainable, updates: Iterator[Any], count: int, device: torch.device) -> dict[str, float]:
    """Return for each phase the fraction of exposed communication, over the next `count` updates.

    NaN on CUDA if the profiler records no kernels, as in a container without that permission.
    """
    with profiler(device) as finished:
        for _ in range(count):
            with marked_phases(trainable, device):
                next(updates)
    return _shares_in([event for event in events_of(finished) if event["name"] != "[memory]"], device.type)


def _shares_in(events: list[dict[str, Any]], device_type: str) -> dict[str, float]:
    marks = [event for event in events if event["name"].startswith(_MARK) and event.get("cat") == "user_annotation"]
    kernels = [event for event in events if event.get("cat") in _ON_CUDA]
    if device_type == "cuda" and not kernels:
        return dict.fromkeys(PHASES, math.nan)
    communicating, computing = _on_cuda(events, kernels) if device_type == "cuda" else _on_cpu(events, marks)
    exposed = _minus(_union(communicating), _union(computing))
    total: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    exposed_total = dict(total)
    for mark in marks:
        phase, mark_span = mark["name"].removeprefix(_MARK), _span(mark)
        total[phase] += mark_span[1] - mark_span[0]
        exposed_total[phase] += sum(
            max(0.0, min(end, mark_span[1]) - max(start, mark_span[0])) for start, end in exposed
        )
    return {phase: exposed_total[phase] / total[phase] if total[phase] else 0.0 for phase in PHASES}


@contextlib.contextmanager
def marked_phases(trainable: Trainable, device: torch.device) -> Generator[None]:
    """Mark each phase of an update in the profile.

    On CUDA it synchronises at the end of each phase, because kernels run later than they are launched and would
    otherwise be counted in a later phase.
    """
    current: list[Any] = [record_function(_MARK + "data")]
    current[0].__enter__()

    def leave() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        current[0].__exit__(None, None, None)

    def enter(phase: str) -> None:
        if current[0].name != _MARK + phase:
            leave()
            current[0] = record_function(_MARK + phase)
            current[0].__enter__()

    try:
        with _observed(trainable, enter):
            yield
    finally:
        leave()


_Span = tuple[float, float]


def _span(event: dict[str, Any]) -> _Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_nccl(kernel: dict[str, Any]) -> bool:
    return "nccl" in kernel["name"]


def _on_cuda(events: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> tuple[list[_Span], list[_Span]]:
    """Return the spans of communication (nccl kernels, gloo), and those of all other kernels."""
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    communicating = [_span(event) for event in [*gloo, *(kernel for kernel in kernels if _is_nccl(kernel))]]
    return communicating, [_span(kernel) for kernel in kernels if not _is_nccl(kernel)]


def _on_cpu(events: list[dict[str, Any]], marks: list[dict[str, Any]]) -> tuple[list[_Span], list[_Span]]:
    """Return the spans of collectives, and those in which this rank's thread computed."""
    thread_ids = {mark["tid"] for mark in marks}
    calls = [_span(event) for event in events if event["name"].startswith(_OWN_CALLS)]
    communicating = [*calls, *(_span(event) for event in events if event["name"].startswith("gloo:"))]
    others = (_MARK, "c10d::", *_OWN_CALLS)
    operators = [_span(e) for e in events if e["tid"] in thread_ids and not e["name"].startswith(others)]
    computing: list[_Span] = []
    for start, end in _leaves(operators):
        if computing and start - computing[-1][1] < _MAX_GAP_US:
            computing[-1] = (computing[-1][0], max(end, computing[-1][1]))
        else:
            computing.append((start, end))
    return communicating, _minus(_union(computing), _union(calls))


def _leaves(spans: list[_Span]) -> list[_Span]:
    """Return the innermost of nested spans."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    return [
        span
        for span, following in itertools.zip_longest(ordered, ordered[1:])
        if following is None or following[0] >= span[1]
    ]


def _union(spans: list[_Span]) -> list[_Span]:
    joined: list[_Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _minus(spans: list[_Span], taken: list[_Span]) -> list[_Span]:
    """Return the parts of `spans` outside `taken`; both sorted and without overlap."""
    remaining: list[_Span] = []
    index = 0
    for start, end in spans:
        while index < len(taken) and taken[index][1] <= start:
            index += 1
        position, next_index = start, index
        while next_index < len(taken) and taken[next_index][0] < end:
            if taken[next_index][0] > position:
                remaining.append((position, taken[next_index][0]))
            position = max(position, taken[next_index][1])
            next_index += 1
        if position < end:
            remaining.append((position, end))
    return remaining


def breakdown(
    splits: Sequence[Sequence[Sequence[float]]], shares: Sequence[Sequence[float]], timed: Sequence[float]
) -> Breakdown | None:
    """Return the parts of a step in the median trial, on the rank that waits least (the others wait for it).

    `splits` has the mean seconds of each phase for each trial and rank, `shares` the exposed fraction of each phase for
    each rank, `timed` the seconds of a step without instruments for each trial. None without trials, or if a rank has
    no shares: communication would then count as computation.
    """
    if not splits or any(math.isnan(share) for exposed_shares in shares for share in exposed_shares):
        return None
    totals = [max(sum(row) for row in split) for split in splits]
    bound = interval([total - step for total, step in zip(totals, timed, strict=True)])
    middle = sorted(range(len(totals)), key=totals.__getitem__)[(len(totals) - 1) // 2]
    ranks = [
        _without_exposed(dict(zip(PHASES, row, strict=True)), dict(zip(PHASES, exposed_shares, strict=True)))
        for row, exposed_shares in zip(splits[middle], shares, strict=True)
    ]
    chosen = min(ranks, key=lambda rank: rank.exposed_communication)
    gap = abs(sum(getattr(chosen, field.name) or 0.0 for field in fields(chosen)) - median(timed))
    return replace(chosen, error=max(-bound.low, bound.high, gap))


def _without_exposed(seconds: dict[str, float], shares: dict[str, float]) -> Breakdown:
    """Return the phases of one rank, with their exposed communication as a separate part."""
    exposed = {phase: seconds[phase] * shares[phase] for phase in PHASES}
    parts = {phase: seconds[phase] - exposed[phase] for phase in PHASES}
    return Breakdown(exposed_communication=sum(exposed.values()), **parts)
