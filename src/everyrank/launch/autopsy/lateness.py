"""Finds the rank for which the others wait, from the time at which each rank arrives at each collective.

rank 0   |-- compute --|. . . . . waits . . . . .|
rank 1   |-------------- compute ----------------|     rank 1 costs the time since rank 2 arrived
rank 2   |--- compute ---|. . . . waits . . . . .|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["LateRank", "arrival_times", "find_late_rank"]

_MAX_CALLS = 64  # newest calls that each rank compares
_MIN_WAIT_FRACTION = 0.15  # a rank is slow if the others wait for it at least this fraction of the time
_MIN_LATENESS_FRACTION = 0.7  # and if it causes at least this fraction of all lateness
_MIN_SECONDS = 0.002  # smaller lateness is noise


@dataclass(frozen=True)
class LateRank:
    """A rank that is late.

    wait_fraction      fraction of the time that the others wait for it
    lateness_fraction  fraction of all lateness that it causes; each wait counts as at most three times the median wait
    mean_seconds       mean time between the second to last arrival and its own
    why                likely cause, if known
    longest_seconds    longest time between the second to last arrival and its own
    window_seconds     time over which the ranks were compared
    """

    rank: int
    wait_fraction: float
    lateness_fraction: float
    mean_seconds: float
    why: str = ""
    longest_seconds: float = 0.0
    window_seconds: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank so much that it is worth a message."""
        return self.wait_fraction >= _MIN_WAIT_FRACTION and self.lateness_fraction >= _MIN_LATENESS_FRACTION

    def as_event(self) -> dict[str, Any]:
        """Return the entry of events.jsonl. Its keys must not change, because users keep these files."""
        return {
            "rank": self.rank,
            "share": self.wait_fraction,
            "part": self.lateness_fraction,
            "seconds": self.mean_seconds,
            "why": self.why,
            "longest_seconds": self.longest_seconds,
            "window_seconds": self.window_seconds,
        }

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slower than the others: they wait for it {self.wait_fraction:.0%} of the time "
            f"(it causes {self.lateness_fraction:.0%} of all lateness, {1000 * self.mean_seconds:.0f} ms each time); "
            f"{self.why}"
        )


def arrival_times(recorded: Mapping[str, Any], base_ns: int = 0, since_ns: int = 0) -> dict[str, list[list[Any]]]:
    """Return {process group: [its ranks, [number, arrival in µs], ...]} for a rank's newest collectives.

    `recorded` is a result of `world.calls.recorded_calls`. Arrivals count from `base_ns`; those before `since_ns` are
    left out.
    """
    by_group: dict[str, list[list[Any]]] = {}
    for group, number, _, _, _, _, is_message, time_ns, *_ in recorded.get("calls", [])[-_MAX_CALLS:]:
        if not is_message and group in recorded["groups"] and time_ns > since_ns:
            by_group.setdefault(group, [recorded["groups"][group]]).append([number, (time_ns - base_ns) // 1000])
    return by_group


def find_late_rank(arrivals_by_rank: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> LateRank | None:
    """Return the rank for which the others waited longest; None if there were fewer than three waits.

    `arrivals_by_rank`: `arrival_times` of each rank.

    Collectives that are started without waiting for the previous one, for example the buckets of
    DistributedDataParallel, count as one, because the same lateness shows in all of them. Collectives at which the last
    two ranks arrived at about the same time do not count.
    """
    collectives_by_time = sorted(_complete_collectives(arrivals_by_rank), key=lambda arrivals: max(arrivals.values()))
    late_arrivals: list[tuple[float, int, set[int]]] = []  # lateness in µs, the late rank, all ranks of the collective
    chain: list[dict[int, float]] = []
    for arrivals in [*collectives_by_time, {}]:
        overlaps = bool(chain) and any(arrivals.get(rank, 1e18) < max(chain[-1].values()) for rank in chain[-1])
        if chain and not (arrivals and overlaps):
            gap, late_rank = max(_gap(arrived) for arrived in chain)
            if gap >= 1e6 * _MIN_SECONDS:
                late_arrivals.append((gap, late_rank, {rank for arrived in chain for rank in arrived}))
            chain = []
        if arrivals:
            chain.append(arrivals)
    gaps_by_rank: dict[int, list[float]] = {}
    for gap, late_rank, _ in late_arrivals:
        gaps_by_rank.setdefault(late_rank, []).append(gap)
    rank = max(gaps_by_rank, key=lambda candidate: sum(gaps_by_rank[candidate]), default=-1)
    gaps_with_rank = [(gap, late_rank) for gap, late_rank, ranks in late_arrivals if rank in ranks]
    if len(gaps_with_rank) < 3:
        return None
    gap_cap = 3 * median(gap for gap, _ in gaps_with_rank)
    lateness_fraction = sum(min(gap, gap_cap) for gap, late_rank in gaps_with_rank if late_rank == rank) / sum(
        min(gap, gap_cap) for gap, _ in gaps_with_rank
    )
    window = max(collectives_by_time[-1].values()) - min(collectives_by_time[0].values())
    return LateRank(
        rank,
        wait_fraction=min(1.0, sum(gaps_by_rank[rank]) / window),
        lateness_fraction=lateness_fraction,
        mean_seconds=1e-6 * sum(gaps_by_rank[rank]) / len(gaps_by_rank[rank]),
        longest_seconds=1e-6 * max(gaps_by_rank[rank]),
        window_seconds=1e-6 * window,
    )


def _complete_collectives(
    arrivals_by_rank: Sequence[Mapping[str, Sequence[Sequence[Any]]]],
) -> list[dict[int, float]]:
    """Return the arrival of each rank, µs, for each collective that all of its ranks have recorded."""
    by_call: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = {}
    for rank, groups in enumerate(arrivals_by_rank):
        for group, (ranks, *rows) in groups.items():
            for number, arrival in rows:
                by_call.setdefault((group, tuple(ranks), number), {})[rank] = arrival
    return [arrivals for (_, ranks, _), arrivals in by_call.items() if len(ranks) == len(arrivals) > 1]


def _gap(arrivals: Mapping[int, float]) -> tuple[float, int]:
    """Return the µs between the second to last and the last arrival, and the rank that came last."""
    *_, (second_to_last, _), (last, rank) = sorted((arrival, rank) for rank, arrival in arrivals.items())
    return last - second_to_last, rank
