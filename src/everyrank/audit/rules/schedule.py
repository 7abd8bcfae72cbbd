"""Checks that a learning-rate schedule steps once per update or epoch, and with the same metric on all ranks."""

from __future__ import annotations

import math
from collections import Counter

from everyrank.audit.events import PlateauStep, ScheduleStep
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_schedule"]

_MIN_UPDATES = 4  # repeated steps of a schedule are reported if they occur in at least this many updates
_METRIC_TOLERANCE = 1e-4  # relative: the rounding of sums in a different order


def check_schedule(evidence: Evidence, findings: Findings) -> None:
    """Check how often each schedule steps between two optimizer steps, and with which metric."""
    _check_frequency(evidence, findings)
    _check_plateau_frequency(evidence, findings)
    if evidence.world_size > 1 and not evidence.is_split:
        _check_plateau(evidence, findings)


def _check_plateau(evidence: Evidence, findings: Findings) -> None:
    """Find ranks that are given different metrics, so they lower their learning rates at different times."""
    for events in zip(*(evidence.of(rank, PlateauStep) for rank in evidence.ranks), strict=False):
        values = [event.value for event in events]
        is_equal = all(math.isclose(value, values[0], rel_tol=_METRIC_TOLERANCE) for value in values)
        if len({event.line for event in events}) == 1 and all(map(math.isfinite, values)) and not is_equal:
            shown_values = ", ".join(
                f"{value:.6g} on rank {rank}" for rank, value in zip(evidence.ranks, values, strict=True)
            )
            update = events[0].update
            when = f"after update {update - 1}" if update else "before the first update"
            findings.add(
                "WARN",
                "schedule.differs",
                events[0].line,
                f"ReduceLROnPlateau is given a different metric on each rank ({shown_values} {when}), so the ranks "
                "lower their learning rates at different times",
                "all-reduce the metric first",
            )
            return


def _check_frequency(evidence: Evidence, findings: Findings) -> None:
    """Find schedules that step several times instead of once, after each update or after each epoch."""
    events = evidence.of(evidence.ranks[0], ScheduleStep)
    for schedule in {event.schedule for event in events}:
        steps = [event for event in events if event.schedule == schedule]
        counts = Counter(event.update for event in steps)
        # Accelerate steps a schedule world_size times per update: its length counts the batches before they are split
        if steps[0].is_prepared and all(count % evidence.world_size == 0 for count in counts.values()):
            counts = Counter({update: count // evidence.world_size for update, count in counts.items()})
        repeated_counts = [count for count in counts.values() if count > 1]
        num_ranks = evidence.world_size
        repeats_per_update = len(repeated_counts) >= _MIN_UPDATES and 2 * len(repeated_counts) >= len(evidence.steps)
        repeats_per_epoch = len(counts) > 1 and set(counts.values()) == {num_ranks} != {1}
        if not (repeats_per_update or repeats_per_epoch):
            continue
        count = Counter(repeated_counts).most_common(1)[0][0]
        per_rank_text = _per_rank_text(count, num_ranks)
        period = "update" if repeats_per_update else "epoch"
        findings.add(
            "FAIL" if per_rank_text and repeats_per_update else "WARN",
            "schedule.often",
            steps[0].line,
            f"{steps[0].name} steps {count} times per {period}{per_rank_text}, so it runs {count} times too fast",
            f"step it once per {period}, or construct it for {count} times the steps",
        )


def _check_plateau_frequency(evidence: Evidence, findings: Findings) -> None:
    """Find a ReduceLROnPlateau that steps several times with each metric value, although its patience counts steps."""
    events = [event for event in evidence.of(evidence.ranks[0], PlateauStep) if not event.is_prepared]
    counts = Counter((event.schedule, event.update, event.value) for event in events)
    if not events or min(counts.values()) < 2:
        return
    count = min(counts.values())
    findings.add(
        "WARN",
        "schedule.often",
        events[0].line,
        f"ReduceLROnPlateau steps {count} times with each metric value{_per_rank_text(count, evidence.world_size)}, so "
        f"its patience lasts only 1/{count} as long",
        "step it once after each evaluation",
    )


def _per_rank_text(count: int, num_ranks: int) -> str:
    return f", once for each of the {num_ranks} ranks" if count == num_ranks > 1 else ""
