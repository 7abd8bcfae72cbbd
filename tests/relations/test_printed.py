"""Numbers that a script shows: which of them may differ from those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everyrank.audit.finding import Findings
from everyrank.relations.printed import judge_printed
from everyrank.relations.samples import judge_uneven_passes
from everyrank.rerun import Imposed, Printed, RankRecording, ScriptRecording


def _line(numbers: list[float]) -> str:
    return " ".join(f"{each:.6f}" for each in numbers)


def _positions(numbers: list[float]) -> list[int]:
    return [len(_line([*numbers[:index], 0.0])) - len("0.000000") for index in range(len(numbers))]


def rank_with(shown: list[list[float]], **facts: Any) -> RankRecording:
    """A rank that shows a line after each update."""
    printed = [
        Printed("train.py:9", number, _line(numbers), numbers, _positions(numbers), "stdout", number + 1)
        for number, numbers in enumerate(shown)
    ]
    return RankRecording([], printed, "", {}, {}, [], [], facts)


def run_of(*ranks: RankRecording) -> ScriptRecording:
    return ScriptRecording(ranks, "", "", 0.0, Path(), float64=True)


# numbers of two ranks, of one rank with all samples, of rank 0 alone, of rank 1 alone -> the reason
SHOWN = {
    "a mean of means": (
        [0.4, 0.5, 0.7],
        [0.42, 0.52, 0.71],
        [0.3, 0.2, 0.5],
        [0.5, 0.8, 0.9],
        "neither the number of all samples",
    ),
    "that of all samples": ([0.4, 0.5, 0.7], [0.4, 0.5, 0.7], [0.3, 0.2, 0.5], [0.5, 0.8, 0.9], ""),
    "rank 0's own": ([0.3, 0.2, 0.5], [0.42, 0.52, 0.71], [0.3, 0.2, 0.5], [0.5, 0.8, 0.9], ""),
    "the largest of all ranks": ([0.5, 0.8, 0.9], [0.42, 0.52, 0.71], [0.3, 0.2, 0.5], [0.5, 0.8, 0.9], ""),
    "a sum over the ranks": ([0.8, 1.0, 1.4], [0.4, 0.5, 0.7], [0.3, 0.2, 0.5], [0.5, 0.8, 0.9], "2 times"),
    "samples so far": ([32.0, 64.0, 96.0], [16.0, 32.0, 48.0], [16.0, 32.0, 48.0], [16.0, 32.0, 48.0], ""),
    "thousands of tokens so far": ([1.5, 2.5, 3.5], [0.75, 1.25, 1.75], [0.75, 1.25, 1.75], [0.75, 1.25, 1.75], ""),
    "samples of each update": ([32.0, 32.0, 32.0], [16.0, 16.0, 16.0], [16.0, 16.0, 16.0], [16.0, 16.0, 16.0], ""),
}


@pytest.mark.parametrize(("many", "one", "alone", "elsewhere", "reason"), SHOWN.values(), ids=list(SHOWN))
def test_a_number_is_that_of_one_rank_or_may_differ(
    many: list[float], one: list[float], alone: list[float], elsewhere: list[float], reason: str
) -> None:
    findings = Findings()
    lines = [[[each] for each in numbers] for numbers in (many, one, alone, elsewhere)]

    def run_alone(imposed: Imposed) -> ScriptRecording:
        return run_of(rank_with(lines[3] if imposed.only_rank == 1 else lines[2]))

    both = run_of(rank_with(lines[0]), rank_with([]))
    judge_printed(both, rank_with(lines[1]), rank_with(lines[2]), run_alone, 3, 1e-7, findings)
    assert bool(findings) == bool(reason)
    assert all(reason in finding.text and finding.rule == "ranks.printed" for finding in findings)


@pytest.mark.parametrize(
    ("batches", "is_found"),
    [([[3, 3, 3, 1], [2, 2, 2, 2, 2]], True), ([[3, 3, 3, 1], [3, 3, 3, 1]], False), ([[9], [6, 3]], False)],
)
def test_ranks_that_are_in_different_passes(batches: list[list[int]], is_found: bool) -> None:
    """They draw a new order after different numbers of batches."""
    ranks: list[RankRecording] = []
    for counts in batches:
        read = [[0, 0, 0, "train.py:20", order] for order, count in enumerate(counts) for _ in range(count)]
        ranks.append(rank_with([], read=read, trained=[0], loader_places={0: "train.py:7"}))
    findings = Findings()
    judge_uneven_passes(run_of(*ranks), findings)
    assert [finding.rule for finding in findings] == ["data.uneven-passes"] * is_found
    assert all(finding.place == "train.py:7" and "3, 2 batches" in finding.text for finding in findings)


def test_numbers_after_random_numbers_of_an_evaluation_are_not_compared() -> None:
    """One rank draws them for its rows in another order."""
    findings = Findings()
    one = rank_with([[0.42], [0.52], [0.71]], drawn_without_grad=[1, 2, 3])
    alone = rank_with([[0.3], [0.2], [0.5]])
    both = run_of(rank_with([[0.4], [0.5], [0.7]]), rank_with([]))
    judge_printed(both, one, alone, lambda imposed: run_of(alone), 3, 1e-7, findings)
    assert findings == []
    assert findings.unchecked == ["numbers of train.py:9: its evaluation draws random numbers"]
