"""Finds stragglers during the training: which rank is slow, how much of the time the others wait for it, and why.

In a collective all ranks wait for the last one. So an update takes equally long on all ranks, and no clock shows which
rank was slow. The arrival times at each collective show it. Every rank records them already (`world.calls`), and every
few seconds the ranks compare them. The time between the last and the second to last arrival is lost on all others:

    rank 0   |-- compute --|. . . . . waits . . . . .|
    rank 1   |-------------- compute ----------------|     rank 1 costs the time since rank 2 arrived
    rank 2   |--- compute ---|. . . . waits . . . . .|

A rank is reported if it costs the others much of the time in several windows in a row, and causes nearly all of the
lateness. Lateness that moves from rank to rank is noise.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from everyrank.launch.autopsy.lateness import Lateness, arrival_times, find_latest
from everyrank.parallel.mesh import Mesh
from everyrank.train.display import Display
from everyrank.train.log import Log
from everyrank.world.calls import recorded_calls
from everyrank.world.collectives import all_gather_json

__all__ = ["StragglerWatch", "why_late"]

_WINDOW_SECONDS = 3.0  # between two comparisons; each takes some milliseconds
_WINDOWS = 3  # windows in a row in which a rank is the slowest before it is reported
_MIN_SHARE = 0.5  # a cause has to explain this fraction of the lateness


class StragglerWatch:
    """Compares the ranks of a training every few seconds. Every rank has one.

    It is off under pipeline, whose stages run in turn, and with parameter servers, which wait for all ranks.
    """

    def __init__(self, mesh: Mesh, window_seconds: float = _WINDOW_SECONDS, windows: int = _WINDOWS) -> None:
        self.world, self.window_seconds, self.windows = mesh.world, window_seconds, windows
        self.is_on = self.world.size > 1 and self.world.group is not None and not mesh.servers
        self.is_on = self.is_on and mesh.size("pipeline") == 1
        self.data_seconds, self.num_updates = 0.0, 0
        self.begun, self.base = time.perf_counter(), self._base()
        self.usage = _usage()
        self.in_a_row: list[Lateness] = []
        self.named: int | None = None

    def fetched(self, seconds: float) -> None:
        """Count the seconds that loading the data of an update took."""
        self.data_seconds += seconds
        self.num_updates += 1

    def is_due(self) -> bool:
        """Return whether to compare now, by this rank's clock."""
        return self.is_on and time.perf_counter() > self.begun + self.window_seconds

    def look(self) -> Lateness | None:
        """Return the rank that has been slow in enough windows, or None; equal on all ranks. A collective."""
        now, usage = time.perf_counter(), _usage()
        wall = now - self.begun
        local_usage = {name: max(0.0, value - self.usage[name]) for name, value in usage.items()}
        local_usage |= {"data": self.data_seconds, "wall": wall, "updates": self.num_updates}
        rows = all_gather_json({"calls": self._arrivals(), "usage": local_usage}, self.world.group)
        self.data_seconds, self.num_updates = 0.0, 0
        self.begun, self.base, self.usage = time.perf_counter(), self._base(), _usage()
        latest = find_latest([row["calls"] for row in rows])
        return self._named(latest, [row["usage"] for row in rows])

    def report_if_slow(self, done: int, display: Display, log: Log | None) -> None:
        """Compare, print a straggler and write it to the log. A collective."""
        slow = self.look()
        if slow is not None:
            display.line(str(slow))
            if log is not None:
                log.event({"step": done, "straggler": asdict(slow)})

    def _named(self, latest: Lateness | None, usage: Sequence[Mapping[str, float]]) -> Lateness | None:
        if latest is None or not latest.is_slow:
            self.in_a_row.clear()
            return None
        if self.in_a_row and self.in_a_row[-1].rank != latest.rank:
            self.in_a_row.clear()
        self.in_a_row.append(latest)
        if len(self.in_a_row) < self.windows or self.named == latest.rank:
            return None
        self.named = latest.rank
        share, late_share, seconds = (
            median(getattr(lateness, name) for lateness in self.in_a_row) for name in ("share", "part", "seconds")
        )
        return Lateness(latest.rank, share, late_share, seconds, why_late(latest.rank, share, usage))

    def _base(self) -> int:
        """Return the zero of this rank's arrival times, ns. Ranks of one host share a clock.

        On several hosts zero is the end of a common collective, so that differences between clocks do not count.
        """
        return time.time_ns() if len(set(self.world.hosts)) > 1 else 0

    def _arrivals(self) -> dict[str, list[list[Any]]]:
        """Return for each group of this rank its ranks and [number, arrival in µs] of its newest collectives."""
        since = self.base or time.time_ns() - int(1e9 * (time.perf_counter() - self.begun))
        return arrival_times(recorded_calls(with_locations=False), self.base, since)


def why_late(rank: int, share: float, usage: Sequence[Mapping[str, float]]) -> str:
    """Return the likely cause why a rank is late for this share of the time, from the resources of all ranks.

    `usage`, by rank: seconds of `data`, `cpu`, `runqueue` (ready, without a core), `throttled`, `stolen`, `wall`;
    and the number of `updates`.
    """
    late_usage, others = usage[rank], [row for other, row in enumerate(usage) if other != rank]
    wall, updates = late_usage["wall"] or 1.0, late_usage["updates"] or 1.0

    def excess(name: str) -> float:
        return late_usage.get(name, 0.0) - median(row.get(name, 0.0) for row in others)

    if excess("data") >= _MIN_SHARE * share * wall:
        usual_seconds = median(row["data"] / (row["updates"] or 1.0) for row in others)
        late_ms = 1000 * late_usage["data"] / updates
        return f"it waits for data, {late_ms:.0f} ms for each update against {1000 * usual_seconds:.0f} ms"
    for name, text in (
        ("throttled", "its control group holds it back (cpu.max), {:.0%} of the time"),
        ("stolen", "its virtual machine waits for the host's processors (steal), {:.0%} of the time"),
        ("runqueue", "it is ready to compute and has no core {:.0%} of the time: other processes, or too many threads"),
    ):
        if excess(name) >= _MIN_SHARE * share * wall:
            return text.format(late_usage[name] / wall)
    cpu_share = late_usage["cpu"] / wall
    if late_usage["cpu"] >= _MIN_SHARE * (wall - late_usage["data"]):
        return f"it computes ({cpu_share:.0%} of the time on a core): more work than the others, or a slower core"
    return f"it neither computes ({cpu_share:.0%} of the time on a core) nor loads data: a lock, a disk, a sleep"


def _usage() -> dict[str, float]:
    """Return seconds so far: CPU time and run queue of this thread, throttling of its cgroup, steal of its host."""
    usage = {"cpu": time.thread_time(), "runqueue": 0.0, "throttled": 0.0, "stolen": 0.0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        usage["runqueue"] = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        cgroup = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        file = Path("/sys/fs/cgroup") / cgroup.lstrip("/") / "cpu.stat"
        usage["throttled"] = 1e-6 * int(dict(line.split() for line in file.read_text().splitlines())["throttled_usec"])
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        usage["stolen"] = ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    return usage
