"""Measures peak memory: from the CUDA allocator, or on CPU from the allocations in the profiler's trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from pathlib import Path

import torch

from everyrank.measure.profiling import events_of, profiler

__all__ = ["PeakMemory", "free_memory_bytes", "peak_memory"]


class PeakMemory:
    """The peak memory of a block. `bytes` is set when the block ends."""

    bytes: int = 0


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Generator[PeakMemory]:
    """Measure the peak bytes of tensors in the block, without those that existed before it.

    Build the model inside the block to also count parameters, gradients and optimizer state.
    """
    peak = PeakMemory()
    gc.collect()  # so that existing garbage is not freed inside the block
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with profiler(device, memory=True) as finished:
        yield peak
    changes = [e for e in events_of(finished) if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
    alive: dict[int, int] = {}  # address -> bytes of each tensor that was allocated inside the block
    total = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        address, change = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
        if change > 0:
            alive[address] = change
            total += change
            peak.bytes = max(peak.bytes, total)
        else:
            total -= alive.pop(address, 0)


_CGROUPS = (  # cgroup versions 2 and 1: limit, use, and the row of cached files in the statistics
    ("memory.max", "memory.current", "memory.stat", "inactive_file "),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file "),
)


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the free memory of this host, or of this container if its limit is lower; None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(_number(root / "proc/meminfo", "MemAvailable:") * 1024)
    for limit, used, stat, cached in _CGROUPS:
        folder = root / "sys/fs/cgroup"
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            limits.append(_number(folder / limit) - _number(folder / used) + _number(folder / stat, cached))
    return min(limits, default=None)


def _number(path: Path, name: str = "") -> int:
    """Return the number after `name` in a system file. Raises `OSError` or `ValueError` without one."""
    lines = [line for line in path.read_text().splitlines() if line.startswith(name)]
    return int(lines[0].removeprefix(name).split()[0]) if lines else int("")
