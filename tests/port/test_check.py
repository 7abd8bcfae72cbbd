"""The comparison of the lines that a port prints with those of its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.port.check import compare_port
from everyrank.rerun import Printed, RankRecording, RecordedUpdate, ScriptRecording


def printed(text: str) -> Printed:
    """Return the record of a line that was printed to stdout."""
    return Printed("train.py:1", 0, text, [], [], "stdout", 0)


def differing_lines(lines: list[str], port_lines: list[str]) -> list[tuple[str, str]]:
    """Return the lines that differ between a script that prints these lines and a port that prints the others."""
    update = RecordedUpdate([1.0], [], "train.py:1", {}, {}, {}, [], 1, {})
    recordings = [
        ScriptRecording(
            (RankRecording([update], [printed(text) for text in texts], "", {}, {}, [], [], {}),),
            failure="",
            traceback="",
            seconds=0.0,
            folder=Path(),
            float64=True,
        )
        for texts in (lines, port_lines)
    ]
    return compare_port(*recordings, 1e-9).printed


@pytest.mark.parametrize(
    ("line", "port_line"),
    [
        ("val loss 0.00010", "val loss 0.00028"),
        ("lr 0.0001", "lr 0.0002"),
        ("lr 3e-05", "lr 6e-05"),
        ("loss 0.5", "loss 1.0"),
        ("accuracy 98.5", "accuracy 98.6"),
    ],
)
def test_small_numbers_are_compared_relatively(line: str, port_line: str) -> None:
    """For example, the loss of normalized data may be wrong by the number of ranks."""
    assert differing_lines([line], [port_line]) == [(line, port_line)]


@pytest.mark.parametrize(
    ("line", "port_line"),
    [
        ("loss 0.0123", "loss 0.0124"),
        ("loss 2.34567e-05", "loss 2.34569e-05"),
        ("error 0", "error 1.2e-16"),
        ("loss 123.456", "loss 123.457"),
    ],
)
def test_rounding_of_a_printed_number_is_no_difference(line: str, port_line: str) -> None:
    assert differing_lines([line], [port_line]) == []


@pytest.mark.parametrize("line", ["epoch_time 1.5", "Time: 1.5", "ETA 1.5", "took 1.5 s", "elapsed 1.5", "runtime 1.5"])
def test_lines_with_times_are_not_compared(line: str) -> None:
    assert differing_lines([line], [line.replace("1.5", "2.5")]) == []


@pytest.mark.parametrize("line", ["beta 1.5", "theta: 1.5", "metadata 1.5", "sentiment 1.5"])
def test_words_that_contain_the_name_of_a_time_are_compared(line: str) -> None:
    """The letters of "eta" are also in "beta"."""
    assert len(differing_lines([line], [line.replace("1.5", "2.5")])) == 1
