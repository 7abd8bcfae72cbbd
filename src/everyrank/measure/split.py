"""Step-time breakdown: data loading, forward, backward, optimizer, and the exposed communication in them.

`phases` reads a clock whenever a step enters a new phase. This takes a microsecond, and the phases add up to the step.
On CUDA the clock is an event in the stream, so the host does not wait.

`exposed_fractions` runs a few updates under torch.profiler. Communication is exposed while a collective runs and this
rank computes nothing. How both are recognised depends on the device and the backend:

- On CUDA the kernels show both.
- On CPU the events of gloo's threads show when a collective runs. The rank is idle in each gap between two operators
  that is longer than Python needs.
- everyrank's backends run in the rank's thread, so the whole call is communication.
- Horovod runs collectives in a thread of its own, so the rank's wait for that thread is communication.
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

__all__ = ["PHASES", "breakdown", "exposed_fractions", "marked_phases", "phases"]

PHASES = ("data", "forward", "backward", "optimizer")

# The longest gap between two operators of a thread that counts as computation, in microseconds. It is longer than
# Python needs between operators, and shorter than any collective.
_MAX_GAP_US = 30.0
_MARK_PREFIX = "everyrank:"
_BACKEND_CALLS = tuple(f"{name}:" for name in OWN_BACKENDS)
_CUDA_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def phases(trainable: Trainable, updates: Iterable[Any], device: torch.device) -> list[dict[str, float]]:
    """Run `updates` to the end and return the seconds of each phase for each update."""
    rows: list[list[tuple[str, Any]]] = []
    read_clock = _stream_event if device.type == "cuda" else time.perf_counter

    def enter(phase: str) -> None:
        if rows[-1][-1][0] != phase:
            rows[-1].append((phase, read_clock()))

    with _observe_phases(trainable, enter):
        iterator = iter(updates)
        while True:
            rows.append([("data", read_clock())])
            if next(iterator, None) is None:
                break
            rows[-1].append(("end", read_clock()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [_durations(row) for row in rows[:-1]]


@contextlib.contextmanager
def _observe_phases(trainable: Trainable, enter: Callable[[str], None]) -> Generator[None]:
    """Call `enter` with forward, backward or optimizer whenever a step enters that phase."""
    trainable.phase_observers.append(enter)
    try:
        yield
    finally:
        trainable.phase_observers.remove(enter)


def _stream_event() -> torch.cuda.Event:
    """Return a timing event that was recorded in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _durations(row: list[tuple[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase of an update, from (phase, time at its start) and (end, time)."""
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for (phase, start), (_, end) in itertools.pairwise(row):
        seconds[phase] += start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start
    return seconds


def exposed_fractions(
    trainable: Trainable, updates: Iterator[Any], count: int, device: torch.device
) -> dict[str, float]:
    """Run `count` updates and return, for each phase, the fraction of its time that is exposed communication.

    The fractions are NaN on CUDA if the profiler records no kernels. For example, a container may lack the permission.
    """
    with profiler(device) as finished:
        for _ in range(count):
            with marked_phases(trainable, device):
                next(updates)
    return _fractions_in_profile([event for event in events_of(finished) if event["name"] != "[memory]"], device.type)


def _fractions_in_profile(events: list[dict[str, Any]], device_type: str) -> dict[str, float]:
    """Return for each phase the fraction of its time that is exposed communication, from the events of a profile."""
    marks = [
        event for event in events if event["name"].startswith(_MARK_PREFIX) and event.get("cat") == "user_annotation"
    ]
    kernels = [event for event in events if event.get("cat") in _CUDA_CATEGORIES]
    if device_type == "cuda" and not kernels:
        return dict.fromkeys(PHASES, math.nan)
    communicating, computing = _cuda_spans(events, kernels) if device_type == "cuda" else _cpu_spans(events, marks)
    exposed = _minus(_union(communicating), _union(computing))
    total_us: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    exposed_us = dict(total_us)
    for mark in marks:
        phase, mark_span = mark["name"].removeprefix(_MARK_PREFIX), _span(mark)
        total_us[phase] += mark_span[1] - mark_span[0]
        exposed_us[phase] += sum(max(0.0, min(end, mark_span[1]) - max(start, mark_span[0])) for start, end in exposed)
    return {phase: exposed_us[phase] / total_us[phase] if total_us[phase] else 0.0 for phase in PHASES}


@contextlib.contextmanager
def marked_phases(trainable: Trainable, device: torch.device) -> Generator[None]:
    """Mark each phase of an update in the profile.

    On CUDA, the end of a phase synchronises. Kernels run later than they are launched, and would otherwise count in a
    later phase.
    """
    current: list[Any] = [record_function(_MARK_PREFIX + "data")]
    current[0].__enter__()

    def leave() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        current[0].__exit__(None, None, None)

    def enter(phase: str) -> None:
        if current[0].name != _MARK_PREFIX + phase:
            leave()
            current[0] = record_function(_MARK_PREFIX + phase)
            current[0].__enter__()

    try:
        with _observe_phases(trainable, enter):
            yield
    finally:
        leave()


_Span = tuple[float, float]


def _span(event: dict[str, Any]) -> _Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_nccl(kernel: dict[str, Any]) -> bool:
    return "nccl" in kernel["name"]


def _cuda_spans(events: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> tuple[list[_Span], list[_Span]]:
    """Return the spans of communication (NCCL kernels and gloo), and the spans of all other kernels."""
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    communicating = [_span(event) for event in [*gloo, *(kernel for kernel in kernels if _is_nccl(kernel))]]
    return communicating, [_span(kernel) for kernel in kernels if not _is_nccl(kernel)]


def _cpu_spans(events: list[dict[str, Any]], marks: list[dict[str, Any]]) -> tuple[list[_Span], list[_Span]]:
    """Return the spans of collectives, and the spans in which this rank's thread computed."""
    thread_ids = {mark["tid"] for mark in marks}
    backend_calls = [_span(event) for event in events if event["name"].startswith(_BACKEND_CALLS)]
    communicating = [*backend_calls, *(_span(event) for event in events if event["name"].startswith("gloo:"))]
    other_prefixes = (_MARK_PREFIX, "c10d::", *_BACKEND_CALLS)
    operators = [
        _span(event) for event in events if event["tid"] in thread_ids and not event["name"].startswith(other_prefixes)
    ]
    computing: list[_Span] = []
    for start, end in _innermost_spans(operators):
        if computing and start - computing[-1][1] < _MAX_GAP_US:
            computing[-1] = (computing[-1][0], max(end, computing[-1][1]))
        else:
            computing.append((start, end))
    return communicating, _minus(_union(computing), _union(backend_calls))


def _innermost_spans(spans: list[_Span]) -> list[_Span]:
    """Return the spans that contain no other span."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    return [
        span
        for span, following in itertools.zip_longest(ordered, ordered[1:])
        if following is None or following[0] >= span[1]
    ]


def _union(spans: list[_Span]) -> list[_Span]:
    """Return the spans sorted, with overlapping spans merged."""
    merged: list[_Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _minus(spans: list[_Span], removed: list[_Span]) -> list[_Span]:
    """Return `spans` without the time in `removed`. Both must be sorted, without overlap."""
    remaining: list[_Span] = []
    index = 0
    for start, end in spans:
        while index < len(removed) and removed[index][1] <= start:
            index += 1
        position, next_index = start, index
        while next_index < len(removed) and removed[next_index][0] < end:
            if removed[next_index][0] > position:
                remaining.append((position, removed[next_index][0]))
            position = max(position, removed[next_index][1])
            next_index += 1
        if position < end:
            remaining.append((position, end))
    return remaining


def breakdown(
    phase_seconds: Sequence[Sequence[Sequence[float]]],
    exposed: Sequence[Sequence[float]],
    step_seconds: Sequence[float],
) -> Breakdown | None:
    """Return the breakdown of a step in the median trial, on the rank that waits least for other ranks.

    phase_seconds   for each trial and rank, the mean seconds of each phase
    exposed         for each rank, the fraction of exposed communication in each phase
    step_seconds    for each trial, the seconds of a step without instruments

    Return None without trials, or if a fraction of a rank is NaN: communication would then count as computation.
    """
    if not phase_seconds or any(math.isnan(fraction) for fractions in exposed for fraction in fractions):
        return None
    totals = [max(sum(row) for row in rows) for rows in phase_seconds]
    bound = interval([total - step for total, step in zip(totals, step_seconds, strict=True)])
    median_trial = sorted(range(len(totals)), key=totals.__getitem__)[(len(totals) - 1) // 2]
    ranks = [
        _without_exposed(dict(zip(PHASES, row, strict=True)), dict(zip(PHASES, fractions, strict=True)))
        for row, fractions in zip(phase_seconds[median_trial], exposed, strict=True)
    ]
    chosen = min(ranks, key=lambda rank: rank.exposed_communication)
    gap = abs(sum(getattr(chosen, field.name) or 0.0 for field in fields(chosen)) - median(step_seconds))
    return replace(chosen, error=max(-bound.low, bound.high, gap))


def _without_exposed(seconds: dict[str, float], fractions: dict[str, float]) -> Breakdown:
    """Return the breakdown of one rank, with exposed communication taken out of the phases."""
    exposed = {phase: seconds[phase] * fractions[phase] for phase in PHASES}
    remaining = {phase: seconds[phase] - exposed[phase] for phase in PHASES}
    return Breakdown(exposed_communication=sum(exposed.values()), **remaining)
