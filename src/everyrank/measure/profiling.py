"""torch.profiler with the settings that all measurements use."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

__all__ = ["events_of", "profiler", "trace_of"]

_LOG_LEVEL = "KINETO_LOG_LEVEL"
# everyrank's backends wait in a thread that torch does not profile by default
_ALL_THREADS: Any = _ExperimentalConfig(profile_all_threads=True)


@contextlib.contextmanager
def profiler(device: torch.device, memory: bool = False) -> Generator[profile]:
    """Profile the CPU and this rank's device; with `memory`, record allocations instead of all threads."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    sets_log_level = _LOG_LEVEL not in os.environ  # the profiler would log between our lines
    if sets_log_level:
        os.environ[_LOG_LEVEL] = "99"
    try:
        config = None if memory else _ALL_THREADS  # torch records no memory with profile_all_threads
        with profile(activities=activities, profile_memory=memory, experimental_config=config) as running:
            yield running
    finally:
        if sets_log_level:
            del os.environ[_LOG_LEVEL]


def trace_of(finished: profile) -> dict[str, Any]:
    """Return the Chrome trace of a stopped profiler."""
    return _read(finished)


def events_of(finished: profile) -> list[dict[str, Any]]:
    """Return the events with a duration and all allocations, reduced to the fields that are used here.

    A trace of a few updates may have a million events, which would take gigabytes with all their fields.
    """
    return [event for event in _read(finished, _slim)["traceEvents"] if event is not None]


def _read(finished: profile, change: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="everyrank-") as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"), object_hook=change)


def _slim(item: dict[str, Any]) -> dict[str, Any] | None:
    if "ph" not in item:
        return item
    name = sys.intern(str(item.get("name", "")))
    if name == "[memory]":
        return {"name": name, "ts": item["ts"], "args": item["args"]}
    if item["ph"] != "X":
        return None
    category = sys.intern(str(item.get("cat", "")))
    return {"name": name, "cat": category, **{key: item[key] for key in ("ts", "dur", "tid")}}
