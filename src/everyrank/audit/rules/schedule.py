"""Whether the learning-rate schedule is stepped once an update, or once an epoch."""

from __future__ import annotations

from collections import Counter

from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_schedule"]

_FEW = 4  # updates: too few to say how often


def check_schedule(evidence: Evidence, findings: Findings) -> None:
    """How often each schedule is stepped between two optimizer steps."""
    events = evidence.of(evidence.ranks[0], "schedule")
    for schedule in {event["schedule"] for event in events}:
        own = [event for event in events if event["schedule"] == schedule]
        counts = Counter(event["update"] for event in own)
        # Accelerate steps a schedule that was made for all batches of an epoch once for each rank
        if own[0]["is_prepared"] and all(count % evidence.world_size == 0 for count in counts.values()):
            counts = Counter({update: count // evidence.world_size for update, count in counts.items()})
        often = [count for count in counts.values() if count > 1]
        if len(often) < _FEW or 2 * len(often) < len(evidence.steps):
            continue
        count, num_ranks = Counter(often).most_common(1)[0][0], evidence.world_size
        why = f", as often as there are ranks ({num_ranks})" if count == num_ranks > 1 else ""
        findings.add(
            "FAIL" if why else "WARN",
            "schedule.often",
            own[0]["line"],
            f"{own[0]['name']} is stepped {count} times an update{why}: it ends {count} times too early",
            "step it once after each optimizer.step(), or make it for that many steps",
        )
