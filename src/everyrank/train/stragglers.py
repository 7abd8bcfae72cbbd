"""Which ranks are slower than the others, for how much of the time, and why: told while the training runs.

In a collective each waits for the last one, so all ranks take the same time for an update and no clock of one rank says
who it was. What says so is when each *came* to the same collectives, which every rank knows anyway (`world.calls`):
every few seconds the ranks compare notes. The time between the last and the one before it is lost to all the others:

    rank 0   |-- compute --|. . . . . waits . . . . .|
    rank 1   |-------------- compute ----------------|     rank 1 costs what lies between the two ends
    rank 2   |--- compute ---|. . . . waits . . . . .|

A rank that is named has cost the others much of the time in several looks, one after the other, and nearly all lateness
was its: what one rank after the other is late by is noise.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from everyrank.parallel.mesh import Mesh
from everyrank.train.display import Display
from everyrank.train.log import Log
from everyrank.world.calls import recorded_calls
from everyrank.world.collectives import all_gather_json

__all__ = ["Lateness", "StragglerWatch", "find_latest", "why_late"]

_WINDOW_SECONDS = 3.0  # from one look to the next: each costs some milliseconds
_WINDOWS = 3  # one after the other, in which the same rank was the slowest, until it is named
_MOST_CALLS = 64  # that each rank tells of, the newest
_LEAST_SHARE = 0.15  # of the time that the others wait for it
_LEAST_PART = 0.7  # of all lateness
_LEAST_SECONDS = 0.002  # by which one is late: less is the system's own noise
_MOST = 0.5  # of the lateness: what explains so much of it is its cause


@dataclass(frozen=True)
class Lateness:
    """A rank that comes late.

    share     of the time that the others wait for it
    part      of all lateness, how much is this rank's; a checkpoint that one writes in between counts no more than
              three usual ones
    seconds   by which it is later than the one before it, each time
    """

    rank: int
    share: float
    part: float
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slower than the others: they wait for it {self.share:.0%} of the time "
            f"({self.part:.0%} of all lateness is its, {1000 * self.seconds:.0f} ms each time); {self.why}"
        )


class StragglerWatch:
    """Compares the ranks of a training every few seconds. Every rank has one.

    Not under pipeline, whose stages come one after the other, nor with parameter servers, who wait for all.
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
        """An update's data took so long to come."""
        self.data_seconds += seconds
        self.num_updates += 1

    def is_due(self) -> bool:
        """Whether it is time to compare, by the clock of this rank."""
        return self.is_on and time.perf_counter() > self.begun + self.window_seconds

    def look(self) -> Lateness | None:
        """The rank that has now been slow for long enough, the same on all ranks; None without one. A collective."""
        now, usage = time.perf_counter(), _usage()
        wall = now - self.begun
        own = {name: max(0.0, value - self.usage[name]) for name, value in usage.items()}
        own |= {"data": self.data_seconds, "wall": wall, "updates": self.num_updates}
        rows = all_gather_json({"calls": self._arrivals(), "usage": own}, self.world.group)
        self.data_seconds, self.num_updates = 0.0, 0
        self.begun, self.base, self.usage = time.perf_counter(), self._base(), _usage()
        found = find_latest([row["calls"] for row in rows])
        return self._named(found, [row["usage"] for row in rows])

    def look_and_tell(self, done: int, display: Display, log: Log | None) -> None:
        """`look`, and what it finds on the screen and in the log's events, after so many updates. A collective."""
        slow = self.look()
        if slow is not None:
            display.line(str(slow))
            if log is not None:
                log.event({"step": done, "straggler": asdict(slow)})

    def _named(self, found: Lateness | None, usage: Sequence[Mapping[str, float]]) -> Lateness | None:
        is_slow = found is not None and found.share >= _LEAST_SHARE and found.part >= _LEAST_PART
        if found is None or not is_slow:
            self.in_a_row.clear()
            return None
        if self.in_a_row and self.in_a_row[-1].rank != found.rank:
            self.in_a_row.clear()
        self.in_a_row.append(found)
        if len(self.in_a_row) < self.windows or self.named == found.rank:
            return None
        self.named = found.rank
        share, part, seconds = (
            median(getattr(one, name) for one in self.in_a_row) for name in ("share", "part", "seconds")
        )
        return Lateness(found.rank, share, part, seconds, why_late(found.rank, share, usage))

    def _base(self) -> int:
        """From when on arrivals are counted, ns: ranks of one host have one clock; others leave a collective together.

        What one host's clock is ahead of another's by is no lateness.
        """
        return time.time_ns() if len(set(self.world.hosts)) > 1 else 0

    def _arrivals(self) -> dict[str, list[list[Any]]]:
        """By group that this rank is in: its ranks, and [number, arrival in µs] of its newest collectives."""
        known = recorded_calls(with_places=False)
        found: dict[str, list[list[Any]]] = {}
        since = self.base or time.time_ns() - int(1e9 * (time.perf_counter() - self.begun))
        for group, number, _, _, _, _, is_message, time_ns, *_ in known.get("calls", [])[-_MOST_CALLS:]:
            if not is_message and group in known["groups"] and time_ns > since:
                rows = found.setdefault(group, [known["groups"][group]])
                rows.append([number, (time_ns - self.base) // 1000])
        return found


def find_latest(calls: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> Lateness | None:
    """The rank for which the others waited longest. `calls`: by rank, what `_arrivals` says; None without any.

    Collectives that nobody waited for before calling the next one (the buckets of DistributedDataParallel) count as
    one: the same lateness shows in all of them. Those to which all came at about the same time do not count: right
    after another one they always do.
    """
    steps = sorted(_arrived_together(calls), key=lambda arrivals: max(arrivals.values()))
    late: list[tuple[float, int, set[int]]] = []  # µs, by whom, among whom
    chain: list[dict[int, float]] = []
    for arrivals in [*steps, {}]:
        is_next = bool(chain) and any(arrivals.get(rank, 1e18) < max(chain[-1].values()) for rank in chain[-1])
        if chain and not (arrivals and is_next):
            gap, rank = max(_gap(one) for one in chain)
            if gap >= 1e6 * _LEAST_SECONDS:
                late.append((gap, rank, {one for arrived in chain for one in arrived}))
            chain = []
        if arrivals:
            chain.append(arrivals)
    lost = {rank: [gap for gap, one, _ in late if one == rank] for _, rank, _ in late}
    rank = max(lost, key=lambda one: sum(lost[one]), default=-1)
    with_it = [(gap, one) for gap, one, ranks in late if rank in ranks]
    if len(with_it) < 3:
        return None
    most = 3 * median(gap for gap, _ in with_it)
    part = sum(min(gap, most) for gap, one in with_it if one == rank) / sum(min(gap, most) for gap, _ in with_it)
    share = min(1.0, sum(lost[rank]) / (max(steps[-1].values()) - min(steps[0].values())))
    return Lateness(rank, share, part, 1e-6 * sum(lost[rank]) / len(lost[rank]))


def _arrived_together(calls: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> list[dict[int, float]]:
    """Of each collective of which all of its ranks have told: when each came, µs."""
    by_call: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = {}
    for rank, groups in enumerate(calls):
        for group, (ranks, *rows) in groups.items():
            for number, arrival in rows:
                by_call.setdefault((group, tuple(ranks), number), {})[rank] = arrival
    return [arrivals for (_, ranks, _), arrivals in by_call.items() if len(ranks) == len(arrivals) > 1]


def _gap(arrivals: Mapping[int, float]) -> tuple[float, int]:
    """(µs between the last and the one before it, the rank that came last)."""
    *_, (before, _), (last, rank) = sorted((arrival, rank) for rank, arrival in arrivals.items())
    return last - before, rank


def why_late(rank: int, share: float, usage: Sequence[Mapping[str, float]]) -> str:
    """What explains that a rank is late for this share of the time, from what each has used; in words.

    `usage`, by rank: seconds of `data`, `cpu`, `runqueue` (ready, without a core), `throttled`, `stolen`, `wall`;
    and the number of `updates`.
    """
    own, others = usage[rank], [one for other, one in enumerate(usage) if other != rank]
    wall, updates = own["wall"] or 1.0, own["updates"] or 1.0

    def more(name: str) -> float:
        return own.get(name, 0.0) - median(one.get(name, 0.0) for one in others)

    if more("data") >= _MOST * share * wall:
        usual = median(one["data"] / (one["updates"] or 1.0) for one in others)
        return f"it waits for data, {1000 * own['data'] / updates:.0f} ms for each update against {1000 * usual:.0f} ms"
    for name, text in (
        ("throttled", "its control group holds it back (cpu.max), {:.0%} of the time"),
        ("stolen", "its host's processors are lent to other machines (steal), {:.0%} of the time"),
        ("runqueue", "it is ready to compute and has no core {:.0%} of the time: other processes, or too many threads"),
    ):
        if more(name) >= _MOST * share * wall:
            return text.format(own[name] / wall)
    if own["cpu"] >= _MOST * (wall - own["data"]):
        return (
            f"it computes ({own['cpu'] / wall:.0%} of the time on a core): more work than the others, or a slower core"
        )
    return f"it neither computes ({own['cpu'] / wall:.0%} of the time on a core) nor loads: a lock, a disk, a sleep"


def _usage() -> dict[str, float]:
    """Seconds so far: of this thread on a core, and of it without one; of its control group and host held back."""
    found = {"cpu": time.thread_time(), "runqueue": 0.0, "throttled": 0.0, "stolen": 0.0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["runqueue"] = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        place = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        file = Path("/sys/fs/cgroup") / place.lstrip("/") / "cpu.stat"
        found["throttled"] = 1e-6 * int(dict(line.split() for line in file.read_text().splitlines())["throttled_usec"])
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        found["stolen"] = ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    return found
