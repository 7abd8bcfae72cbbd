"""The rank for which the others wait, found by when each rank arrives at each collective.

rank 0   |-- compute --|. . . . . waits . . . . .|
rank 1   |-------------- compute ----------------|     rank 1 costs the time since rank 2 arrived
rank 2   |--- compute ---|. . . . waits . . . . .|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Lateness", "arrival_times", "find_latest"]

_MAX_CALLS = 64  # newest calls that each rank compares
_MIN_SHARE = 0.15  # smallest share of the time that the others wait for the rank
_MIN_PART = 0.7  # smallest part of all lateness that is this rank's
_MIN_SECONDS = 0.002  # smaller lateness is noise


@dataclass(frozen=True)
class Lateness:
    """A rank that is late.

    share     share of the time that the others wait for it
    part      its part of all lateness; a long pause, for example for a checkpoint, counts as three usual ones
    seconds   mean time between the second to last arrival and its own, and the longest such time
    why       likely cause, if known
    window_seconds   over which the ranks were compared
    """

    rank: int
    share: float
    part: float
    seconds: float
    why: str = ""
    longest_seconds: float = 0.0
    window_seconds: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank so much that it is worth a message."""
        return self.share >= _MIN_SHARE and self.part >= _MIN_PART

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slower than the others: they wait for it {self.share:.0%} of the time "
            f"(it causes {self.part:.0%} of all lateness, {1000 * self.seconds:.0f} ms each time); {self.why}"
        )


def arrival_times(recorded: Mapping[str, Any], base_ns: int = 0, since_ns: int = 0) -> dict[str, list[list[Any]]]:
    """Return for each group of a rank its ranks and [number, arrival in µs] of its newest collectives.

    `recorded` is a result of `world.calls.recorded_calls`. Arrivals count from `base_ns`; those before `since_ns` are
    left out.
    """
    by_group: dict[str, list[list[Any]]] = {}
    for group, number, _, _, _, _, is_message, time_ns, *_ in recorded.get("calls", [])[-_MAX_CALLS:]:
        if not is_message and group in recorded["groups"] and time_ns > since_ns:
            by_group.setdefault(group, [recorded["groups"][group]]).append([number, (time_ns - base_ns) // 1000])
    return by_group


def find_latest(calls: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> Lateness | None:
    """Return the rank for which the others waited longest, None without one. `calls`: `arrival_times` of each rank.

    Collectives that are started without waiting for the previous one, for example the buckets of
    DistributedDataParallel, count as one, because the same lateness shows in all of them. Collectives at which all
    ranks arrived at about the same time do not count.
    """
    collectives_by_time = sorted(_arrived_together(calls), key=lambda arrivals: max(arrivals.values()))
    late_arrivals: list[tuple[float, int, set[int]]] = []  # lateness in µs, the late rank, all ranks of the collective
    chain: list[dict[int, float]] = []
    for arrivals in [*collectives_by_time, {}]:
        is_next = bool(chain) and any(arrivals.get(rank, 1e18) < max(chain[-1].values()) for rank in chain[-1])
        if chain and not (arrivals and is_next):
            gap, rank = max(_gap(other) for other in chain)
            if gap >= 1e6 * _MIN_SECONDS:
                late_arrivals.append((gap, rank, {other for arrived in chain for other in arrived}))
            chain = []
        if arrivals:
            chain.append(arrivals)
    gaps_by_rank = {rank: [gap for gap, other, _ in late_arrivals if other == rank] for _, rank, _ in late_arrivals}
    rank = max(gaps_by_rank, key=lambda other: sum(gaps_by_rank[other]), default=-1)
    gaps_of_its_groups = [(gap, other) for gap, other, ranks in late_arrivals if rank in ranks]
    if len(gaps_of_its_groups) < 3:
        return None
    max_gap = 3 * median(gap for gap, _ in gaps_of_its_groups)
    part = sum(min(gap, max_gap) for gap, other in gaps_of_its_groups if other == rank) / sum(
        min(gap, max_gap) for gap, _ in gaps_of_its_groups
    )
    window = max(collectives_by_time[-1].values()) - min(collectives_by_time[0].values())
    share, mean = min(1.0, sum(gaps_by_rank[rank]) / window), 1e-6 * sum(gaps_by_rank[rank]) / len(gaps_by_rank[rank])
    return Lateness(
        rank, share, part, mean, longest_seconds=1e-6 * max(gaps_by_rank[rank]), window_seconds=1e-6 * window
    )


def _arrived_together(calls: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> list[dict[int, float]]:
    """Return the arrival of each rank, µs, for each collective that all of its ranks have recorded."""
    by_call: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = {}
    for rank, groups in enumerate(calls):
        for group, (ranks, *rows) in groups.items():
            for number, arrival in rows:
                by_call.setdefault((group, tuple(ranks), number), {})[rank] = arrival
    return [arrivals for (_, ranks, _), arrivals in by_call.items() if len(ranks) == len(arrivals) > 1]


def _gap(arrivals: Mapping[int, float]) -> tuple[float, int]:
    """Return the µs between the second to last and the last arrival, and the rank that came last."""
    *_, (second_to_last, _), (last, rank) = sorted((arrival, rank) for rank, arrival in arrivals.items())
    return last - second_to_last, rank
