"""Comparison of printed numbers on several ranks with those on one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank.audit.finding import Findings
from everyrank.relations.lines import _relation
from everyrank.relations.numbers import constant_factor, relative_difference, tolerance_of
from everyrank.relations.printed import _margin, judge_printed
from everyrank.relations.samples import judge_uneven_passes
from everyrank.rerun import Imposed, Printed, RankRecording, ScriptRecording


def format_line(numbers: list[float]) -> str:
    """Return the numbers as a script prints them."""
    return " ".join(f"{number:.6f}" for number in numbers)


def number_positions(numbers: list[float]) -> list[int]:
    """Return the index of the first character of each number in the line."""
    return [len(format_line([*numbers[:index], 0.0])) - len("0.000000") for index in range(len(numbers))]


def rank_that_prints(lines: list[list[float]], **facts: Any) -> RankRecording:
    """Return the recording of a rank that prints one line after each update."""
    printed = [
        Printed("train.py:9", update, format_line(numbers), numbers, number_positions(numbers), "stdout", update + 1)
        for update, numbers in enumerate(lines)
    ]
    return RankRecording([], printed, "", {}, {}, [], [], facts)


def run_of(*ranks: RankRecording) -> ScriptRecording:
    """Return the recording of a script on these ranks."""
    return ScriptRecording(ranks, "", "", 0.0, Path(), float64=True)


# Each case has what four runs print: two ranks, one rank with all samples, rank 0 only, and rank 1 only.
# The last entry is the reported reason.
PRINTED_NUMBERS = {
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


@pytest.mark.parametrize(
    ("two_ranks", "one_rank", "rank_0_only", "rank_1_only", "reason"),
    PRINTED_NUMBERS.values(),
    ids=list(PRINTED_NUMBERS),
)
def test_printed_number_must_match_one_rank_or_have_an_allowed_meaning(
    two_ranks: list[float], one_rank: list[float], rank_0_only: list[float], rank_1_only: list[float], reason: str
) -> None:
    """A number may also be local to a rank, a maximum over the ranks, or a count of samples."""
    findings = Findings()
    lines = [[[number] for number in numbers] for numbers in (two_ranks, one_rank, rank_0_only, rank_1_only)]

    def run_one_rank(imposed: Imposed) -> ScriptRecording:
        return run_of(rank_that_prints(lines[3] if imposed.only_rank == 1 else lines[2]))

    two_rank_recording = run_of(rank_that_prints(lines[0]), rank_that_prints([]))
    judge_printed(
        two_rank_recording, rank_that_prints(lines[1]), rank_that_prints(lines[2]), run_one_rank, 3, 1e-7, findings
    )
    assert bool(findings) == bool(reason)
    assert all(reason in finding.text and finding.rule == "ranks.printed" for finding in findings)


@pytest.mark.parametrize(
    ("batches", "is_reported"),
    [([[3, 3, 3, 1], [2, 2, 2, 2, 2]], True), ([[3, 3, 3, 1], [3, 3, 3, 1]], False), ([[9], [6, 3]], False)],
)
def test_different_numbers_of_batches_per_epoch_are_reported(batches: list[list[int]], is_reported: bool) -> None:
    """The ranks start a new shuffle order after different numbers of batches."""
    ranks: list[RankRecording] = []
    for batches_per_epoch in batches:
        read_batches = [
            [0, 0, 0, "train.py:20", epoch]
            for epoch, num_batches in enumerate(batches_per_epoch)
            for _ in range(num_batches)
        ]
        ranks.append(rank_that_prints([], read=read_batches, training_loaders=[0], loader_places={0: "train.py:7"}))
    findings = Findings()
    judge_uneven_passes(run_of(*ranks), findings)
    assert [finding.rule for finding in findings] == ["data.uneven-passes"] * is_reported
    assert all(finding.location == "train.py:7" and "3, 2 batches" in finding.text for finding in findings)


def test_printed_numbers_are_not_compared_if_evaluation_draws_random_numbers() -> None:
    """One rank draws the random numbers of its rows in a different order than two ranks."""
    findings = Findings()
    one_rank = rank_that_prints([[0.42], [0.52], [0.71]], drawn_without_grad=[1, 2, 3])
    rank_0_only = rank_that_prints([[0.3], [0.2], [0.5]])
    two_rank_recording = run_of(rank_that_prints([[0.4], [0.5], [0.7]]), rank_that_prints([]))
    judge_printed(two_rank_recording, one_rank, rank_0_only, lambda imposed: run_of(rank_0_only), 3, 1e-7, findings)
    assert findings == []
    assert findings.unchecked == ["numbers of train.py:9: its evaluation draws random numbers"]


@pytest.mark.parametrize(
    ("text", "number", "margin"),
    [
        ("loss 0.25", 0.25, 0.0101),
        ("loss 3.20e-05", 3.2e-5, 1.01e-7),
        ("loss 1e-05, 2 epochs", 1e-5, 1.01e-5),
        ("loss -1.5E+03.", -1500.0, 101.0),
        ("loss .5", 0.5, 0.101),
        ("7 images", 7.0, 0.5),
        ("7. images", 7.0, 0.5),
    ],
)
def test_margin_is_the_last_digit_of_a_printed_number(text: str, number: float, margin: float) -> None:
    """Numbers with an exponent have a last digit, too. A margin of 0.5 would make all small numbers equal."""
    assert _margin(text, number, 1e-6) == (pytest.approx(margin), 1e-6)


def test_nan_or_infinity_hides_no_difference_of_other_elements() -> None:
    """A state may have such elements, such as the largest value so far or a mask."""
    inf, nan = math.inf, math.nan
    for special in (nan, inf, -inf):
        first = torch.tensor([special, 1.0, 2.0])
        assert relative_difference(first, first.clone()) == 0.0
        assert relative_difference(torch.tensor([special, 1.0, 2.5]), first) == pytest.approx(0.5 / 5**0.5)
        assert relative_difference(torch.tensor([0.0, 1.0, 2.0]), first) == inf
        assert relative_difference(first, torch.tensor([0.0, 1.0, 2.0])) == inf
    assert relative_difference(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])) == inf


def test_imaginary_parts_are_compared() -> None:
    """Layers in the frequency domain have complex parameters. A model may have no others."""
    first = torch.tensor([1 + 1j, 2.0], dtype=torch.complex64)
    assert relative_difference(first + torch.tensor([4j, 0]), first) == pytest.approx(4 / 6**0.5)
    assert relative_difference(first.real, first) == pytest.approx(1 / 6**0.5)
    assert relative_difference(first.conj().conj(), first) == 0.0
    assert constant_factor([(3 * first, first)]) == pytest.approx(3.0)
    assert constant_factor([(1j * first, first)]) is None
    assert (tolerance_of([first]), tolerance_of([first.to(torch.complex128)])) == (5e-4, 1e-6)
    assert _relation([first, 3 * first], 2 * first, 1e-6) == "mean"
    assert _relation([first, first * 1j], first, 1e-6) == ""
