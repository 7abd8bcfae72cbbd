"""Schedules of complete runs, on several ranks and on one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations.schedule import judge_horizon


def complete_run(ranks: int, rates: list[float]) -> Any:
    """A run whose first 40 updates are those of another optimizer."""
    of_another = [SimpleNamespace(rates=[0.5], step="train.py:9", optimizer="train.py:8")] * 40
    updates = [SimpleNamespace(rates=[rate], step="train.py:30", optimizer="train.py:11") for rate in rates]
    facts = {"came_to_end": True, "schedules": ["train.py:12"]}
    rank = SimpleNamespace(facts=facts, updates=[*of_another, *updates])
    return SimpleNamespace(ranks=[rank] * ranks, failure="", folder=Path())


def decay(updates: int, warmup: int, length: int | None = None) -> list[float]:
    """A linear warm-up, and a linear decay that ends after `length` updates."""
    end = length or updates
    return [step / warmup if step < warmup else max(0.0, (end - step) / (end - warmup)) for step in range(updates)]


# rates on two ranks and on one, whether a rule may still say that the schedule is stepped too often, or what is found
RUNS = {
    "the same part of the training": (decay(40, 6), decay(80, 12), set(), ["schedule.often", "ranks.rate"]),
    "a warm-up of as many updates": (decay(40, 6), decay(80, 6), set(), ["schedule.often", "ranks.rate"]),
    "a warm-up that counts the ranks": (decay(40, 20), decay(80, 10), set(), ["schedule.often"]),
    "an end that comes too early": (decay(40, 6, 20), decay(80, 6), {"schedule.horizon"}, []),
    "steps for each rank": ([*decay(40, 6)[::2], *[0.0] * 20], decay(40, 6), {"schedule.horizon"}, []),
    "as many updates": (decay(40, 6), decay(40, 6), set(), []),
    "a length that does not count the ranks": (decay(40, 6, 80), decay(80, 6), {"schedule.horizon"}, []),
}


@pytest.mark.parametrize(("shared", "single", "rules", "refuted"), RUNS.values(), ids=list(RUNS))
def test_what_the_ends_of_schedules_show(
    shared: list[float], single: list[float], rules: set[str], refuted: list[str]
) -> None:
    findings = Findings()
    judge_horizon(complete_run(2, shared), complete_run(1, single), findings)
    assert {finding.rule for finding in findings} == rules
    assert findings.refuted == set(refuted)
