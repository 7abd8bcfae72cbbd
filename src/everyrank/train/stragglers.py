"""Finds stragglers during the training: which rank is slow, how much of the time the others wait for it, and why.

In a collective all ranks wait for the last one. So an update takes equally long on all ranks, and its duration does not
show which rank was slow. The arrival times at each collective show it. Every rank records them already (`world.calls`),
and every few seconds the ranks compare them. The time between the last and the second to last arrival is lost on all
others:

    rank 0   |-- compute --|. . . . . waits . . . . .|
    rank 1   |-------------- compute ----------------|     rank 1 costs the time since rank 2 arrived
    rank 2   |--- compute ---|. . . . waits . . . . .|

The time between two comparisons is a window. A rank is reported if, in three windows in a row, the others wait for it
at least 15% of the time and it causes at least 70% of the lateness. Lateness that moves from rank to rank is noise.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from everyrank.launch.autopsy.lateness import LateRank, arrival_times, find_late_rank
from everyrank.parallel.mesh import Mesh
from everyrank.train.display import Display
from everyrank.train.log import Log
from everyrank.world.calls import recorded_calls
from everyrank.world.collectives import all_gather_json

__all__ = ["StragglerWatch", "why_late"]

_WINDOW_SECONDS = 3.0  # between two comparisons; each takes some milliseconds
_MIN_WINDOWS = 3  # windows in a row in which a rank is the slowest before it is reported
_MIN_EXPLAINED = 0.5  # smallest part of the lateness that a cause explains; for CPU time, of the time without loading


class StragglerWatch:
    """Compares the ranks of a training every few seconds. Every rank has one.

    It is off under pipeline, whose stages run in turn, and with parameter servers, which wait for all ranks.
    """

    def __init__(self, mesh: Mesh, window_seconds: float = _WINDOW_SECONDS, min_windows: int = _MIN_WINDOWS) -> None:
        self.world, self.window_seconds, self.min_windows = mesh.world, window_seconds, min_windows
        self.is_on = self.world.size > 1 and self.world.group is not None and not mesh.servers
        self.is_on = self.is_on and mesh.size("pipeline") == 1
        self.data_seconds, self.num_updates = 0.0, 0
        self.window_start, self.base = time.perf_counter(), self._base()
        self.usage = _usage()
        self.streak: list[LateRank] = []
        self.reported_rank: int | None = None

    def add_loading_time(self, seconds: float) -> None:
        """Add the seconds that loading the data of an update took."""
        self.data_seconds += seconds
        self.num_updates += 1

    def is_due(self) -> bool:
        """Return whether to compare now, by this rank's clock."""
        return self.is_on and time.perf_counter() > self.window_start + self.window_seconds

    def compare(self) -> LateRank | None:
        """Return the rank that was slow in enough windows, or None; equal on all ranks. A collective.

        The rank that was returned last is not returned again before a window in which no rank is slow.
        """
        now, usage = time.perf_counter(), _usage()
        wall = now - self.window_start
        local_usage = {name: max(0.0, value - self.usage[name]) for name, value in usage.items()}
        local_usage |= {"data": self.data_seconds, "wall": wall, "updates": self.num_updates}
        rows = all_gather_json({"calls": self._arrivals(), "usage": local_usage}, self.world.group)
        self.data_seconds, self.num_updates = 0.0, 0
        self.window_start, self.base, self.usage = time.perf_counter(), self._base(), _usage()
        late_rank = find_late_rank([row["calls"] for row in rows])
        return self._rank_to_report(late_rank, [row["usage"] for row in rows])

    def report_if_slow(self, step: int, display: Display, log: Log | None) -> None:
        """Compare, print a straggler and write it to the log. A collective."""
        slow = self.compare()
        if slow is not None:
            display.line(str(slow))
            if log is not None:
                log.event({"step": step, "straggler": slow.as_event()})

    def _rank_to_report(self, late_rank: LateRank | None, usage: Sequence[Mapping[str, float]]) -> LateRank | None:
        """Update the streak; return the rank, with medians over the streak, if it is long enough and not reported."""
        if late_rank is None or not late_rank.is_slow:
            self.streak.clear()
            self.reported_rank = None
            return None
        if self.streak and self.streak[-1].rank != late_rank.rank:
            self.streak.clear()
        self.streak.append(late_rank)
        if len(self.streak) < self.min_windows or self.reported_rank == late_rank.rank:
            return None
        self.reported_rank = late_rank.rank
        wait_fraction = median(late.wait_fraction for late in self.streak)
        return LateRank(
            late_rank.rank,
            wait_fraction,
            median(late.lateness_fraction for late in self.streak),
            median(late.mean_seconds for late in self.streak),
            why_late(late_rank.rank, wait_fraction, usage),
        )

    def _base(self) -> int:
        """Return the time, ns, that arrival times count from: 0 on one host, where all ranks share a clock.

        On several hosts it is the end of the last comparison, a collective, so that clocks need not agree. Before the
        first comparison, it is the time at which this rank started to watch.
        """
        return time.time_ns() if len(set(self.world.hosts)) > 1 else 0

    def _arrivals(self) -> dict[str, list[list[Any]]]:
        """Return {process group: [its ranks, [number, arrival in µs], ...]} for the collectives of this window."""
        since = self.base or time.time_ns() - int(1e9 * (time.perf_counter() - self.window_start))
        return arrival_times(recorded_calls(with_locations=False), self.base, since)


def why_late(rank: int, wait_fraction: float, usage: Sequence[Mapping[str, float]]) -> str:
    """Return the likely reason why the others wait for `rank`, from the usage of all ranks.

    `wait_fraction`: fraction of the time that they wait for it.

    `usage`, by rank: seconds of `data`, `cpu`, `runqueue` (ready, without a core), `throttled`, `stolen`, `wall`;
    and the number of `updates`.
    """
    late_usage, others = usage[rank], [row for other, row in enumerate(usage) if other != rank]
    wall, updates = late_usage["wall"] or 1.0, late_usage["updates"] or 1.0

    def excess(name: str) -> float:
        return late_usage.get(name, 0.0) - median(row.get(name, 0.0) for row in others)

    if excess("data") >= _MIN_EXPLAINED * wait_fraction * wall:
        usual_seconds = median(row["data"] / (row["updates"] or 1.0) for row in others)
        late_ms = 1000 * late_usage["data"] / updates
        return f"it waits for data, {late_ms:.0f} ms per update ({1000 * usual_seconds:.0f} ms on the other ranks)"
    for name, text in (
        ("throttled", "its cgroup throttles it (cpu.max) {:.0%} of the time"),
        ("stolen", "its virtual machine waits for the host's processors (steal), {:.0%} of the time"),
        ("runqueue", "it is ready to compute and has no core {:.0%} of the time: other processes, or too many threads"),
    ):
        if excess(name) >= _MIN_EXPLAINED * wait_fraction * wall:
            return text.format(min(1.0, late_usage[name] / wall))  # the kernel adds up throttled time over CPUs
    cpu_share = late_usage["cpu"] / wall
    if late_usage["cpu"] >= _MIN_EXPLAINED * (wall - late_usage["data"]):
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
