"""Comparison of learning rate schedules in complete runs on two ranks and on one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations.ranks import _Case, _judge_rates
from everyrank.relations.schedule import judge_horizon
from everyrank.rerun import RankRecording, RecordedUpdate, ScriptRecording


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


def test_script_that_only_trains_on_several_ranks_is_not_judged() -> None:
    """On one rank it makes no update, so it has no learning rate."""
    single, findings = complete_run(1, []), Findings()
    single.ranks[0].updates.clear()
    judge_horizon(complete_run(2, decay(40, 6)), single, findings)
    assert findings == []


def judge_groups(ranks: list[list[list[float]]], single: list[list[float]]) -> Findings:
    """Compare the learning rates of the parameter groups in each update, of each rank with those of one rank."""
    recordings = [
        RankRecording(
            [RecordedUpdate([1.0], [], "train.py:30", {}, {}, {}, groups, 1, {}) for groups in updates],
            *([], "", {}, {}, [], [], {}),
        )
        for updates in (*ranks, single)
    ]
    many = ScriptRecording(tuple(recordings[:-1]), "", "", 0.0, Path(), float64=True)
    findings = Findings()
    _judge_rates(_Case(many, recordings[-1], len(single), 1e-6, ""), findings, len(single))
    return findings


def test_each_parameter_group_is_compared_with_its_own_learning_rate() -> None:
    """One group may be scaled by the number of ranks, and another may not. The message has the rate that differs."""
    curve = [1.0, 0.9, 0.7, 0.4, 0.2, 0.1]
    single = [[rate, 0.01 * rate] for rate in curve]
    scaled = [[2 * rate, 0.01 * rate] for rate in curve]
    assert judge_groups([scaled, scaled], single) == []
    first_is_wrong = [[rate, 0.01] for rate in (1.0, 0.9, 0.9, 0.9, 0.9, 0.9)]
    findings = judge_groups([first_is_wrong, first_is_wrong], [[rate, 0.01] for rate in curve])
    assert "update 2: the learning rate is 0.9 on 2 ranks, and 0.7 on one rank" in findings[0].text
    second_differs = judge_groups([[[0.1, 0.2]], [[0.1, 0.3]]], [[0.1, 0.2]])
    assert "ranks step with different learning rates: 0.2, 0.3" in second_differs[0].text
