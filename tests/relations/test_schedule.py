"""Comparison of learning rate schedules in complete runs on two ranks and on one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations.schedule import judge_horizon


def complete_run(num_ranks: int, rates: list[float]) -> Any:
    """Return a complete run with these learning rates, after 40 updates of another optimizer."""
    updates_of_other_optimizer = [SimpleNamespace(rates=[0.5], step="train.py:9", optimizer="train.py:8")] * 40
    updates = [SimpleNamespace(rates=[rate], step="train.py:30", optimizer="train.py:11") for rate in rates]
    facts = {"came_to_end": True, "schedules": ["train.py:12"]}
    rank = SimpleNamespace(facts=facts, updates=[*updates_of_other_optimizer, *updates])
    return SimpleNamespace(ranks=[rank] * num_ranks, failure="", folder=Path())


def decay(updates: int, warmup: int, length: int | None = None) -> list[float]:
    """Return the learning rates of a linear warm-up, and a linear decay that ends after `length` updates."""
    end = length or updates
    return [step / warmup if step < warmup else max(0.0, (end - step) / (end - warmup)) for step in range(updates)]


# Each case has the learning rates on two ranks and on one rank, the reported rules and the refuted rules.
RUNS = {
    "the same part of the training": (decay(40, 6), decay(80, 12), set(), ["schedule.often", "ranks.rate"]),
    "a warm-up of as many updates": (decay(40, 6), decay(80, 6), set(), ["schedule.often", "ranks.rate"]),
    "a warm-up that counts the ranks": (decay(40, 20), decay(80, 10), set(), ["schedule.often"]),
    "an end that comes too early": (decay(40, 6, 20), decay(80, 6), {"schedule.horizon"}, []),
    "steps for each rank": ([*decay(40, 6)[::2], *[0.0] * 20], decay(40, 6), {"schedule.horizon"}, []),
    "as many updates": (decay(40, 6), decay(40, 6), set(), []),
    "a length that does not count the ranks": (decay(40, 6, 80), decay(80, 6), {"schedule.horizon"}, []),
}


@pytest.mark.parametrize(("two_ranks", "one_rank", "rules", "refuted"), RUNS.values(), ids=list(RUNS))
def test_schedule_that_does_not_end_with_the_training_is_reported(
    two_ranks: list[float], one_rank: list[float], rules: set[str], refuted: list[str]
) -> None:
    """A schedule may depend on the number of ranks if it ends with the training."""
    findings = Findings()
    judge_horizon(complete_run(2, two_ranks), complete_run(1, one_rank), findings)
    assert {finding.rule for finding in findings} == rules
    assert findings.refuted == set(refuted)
