"""Checks that numbers that rank 0 prints are those of one rank with all samples, or of rank 0's local training."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable

from everyrank.audit.finding import Findings, short_location
from everyrank.relations.shown_variables import shown_variables
from everyrank.rerun import Imposed, Printed, RankRecording, ScriptRecording

__all__ = ["evaluates", "judge_printed"]

_SHOWN_NUMBER = re.compile(r"(?:\d+\.?|\.(?=\d))(\d*)(?:[eE]([-+]?\d+))?")
_OF_EVALUATION = "it is the number of rank 0's part of the evaluation data only"
_BETWEEN = "it is neither the number of all samples nor that of rank 0, for example because it is a mean of means"

_Line = tuple[str, int, str]
_Margin = tuple[float, float]


def judge_printed(
    many: ScriptRecording,
    single: RankRecording,
    rank_0_alone: RankRecording,
    run_alone: Callable[[Imposed], ScriptRecording],
    num_updates: int,
    tolerance: float,
    findings: Findings,
) -> None:
    """Compare the numbers of each line that was printed in the first `num_updates` updates.

    rank_0_alone  one rank with the batches of rank 0 and the parameters of all ranks
    run_alone     runs one rank again, with only rank 0's evaluation batches, or with the batches of another rank
    """
    numbers = _Numbers(many, single, rank_0_alone, run_alone, tolerance)
    for line in single.printed:
        shown, local = numbers.lines_by_rank[0].get(_key(line)), numbers.rank_0_alone.get(_key(line))
        if shown is None or local is None or shown.update > num_updates:
            continue
        if not len(line.numbers) == len(shown.numbers) == len(local.numbers):
            continue
        if line.update in single.facts.get("drawn_without_grad", []):
            findings.add_unchecked(f"numbers of {short_location(line.place)}: its evaluation draws random numbers")
            continue
        for index, number in enumerate(shown.numbers):
            reason = numbers.why_wrong(line, shown, local, index)
            if reason:
                item, _ = numbers.item(shown, number, _margin(shown.text, number, tolerance))
                findings.add(
                    "WARN",
                    "ranks.printed",
                    line.place,
                    f"the number {number:.6g} of {shown.text.strip()[:80]!r} is {line.numbers[index]:.6g} on one rank "
                    f"with the same samples and weights: {reason}",
                    "sum numerators and denominators over the ranks separately, then divide",
                    other_lines=(item,),
                    variables=shown_variables(line.place, shown.text, shown.positions[index]),
                )
                break


@dataclasses.dataclass(eq=False)
class _Numbers:
    """The lines that each run has printed."""

    many: ScriptRecording
    single: RankRecording
    rank_0_run: RankRecording
    run_alone: Callable[[Imposed], ScriptRecording]
    tolerance: float

    @property
    def num_ranks(self) -> int:
        return len(self.many.ranks)

    @functools.cached_property
    def lines_by_rank(self) -> list[dict[_Line, Printed]]:
        return [{_key(line): line for line in rank.printed} for rank in self.many.ranks]

    @functools.cached_property
    def rank_0_alone(self) -> dict[_Line, Printed]:
        return {_key(line): line for line in self.rank_0_run.printed}

    @functools.cached_property
    def lines_of_rank_0_evaluation(self) -> dict[_Line, Printed]:
        """The lines of one rank with only rank 0's evaluation batches."""
        return self._run(Imposed(recording=self.many, parameters=True, evaluation_rank=0))

    @functools.cached_property
    def lines_of_other_ranks(self) -> list[dict[_Line, Printed]]:
        """The lines of one rank with the batches of each other rank."""
        return [
            self._run(Imposed(recording=self.many, parameters=True, only_rank=rank))
            for rank in range(1, self.num_ranks)
        ]

    def _run(self, imposed: Imposed) -> dict[_Line, Printed]:
        return {_key(line): line for line in self.run_alone(imposed).ranks[0].printed}

    def why_wrong(self, line: Printed, shown: Printed, local: Printed, index: int) -> str:
        """Why a number is wrong: not that of all samples, and not a local number of rank 0; "" if it is correct."""
        number, expected, rank_0_number = shown.numbers[index], line.numbers[index], local.numbers[index]
        margin = _margin(shown.text, number, self.tolerance)
        if _is_near(number, expected, margin) or self.is_of_training(shown, number, margin):
            return ""
        if self.is_of_each_rank(shown, index, margin) or self.is_setting(shown, number, expected):
            return ""
        if self.is_progress(line, index):
            return ""
        if _is_near(number, rank_0_number, margin):
            is_shown_once = not any(_key(line) in of_rank for of_rank in self.lines_by_rank[1:])
            is_asked = is_shown_once and evaluates(self.many.ranks[0])
            return _OF_EVALUATION if is_asked and _has(self.lines_of_rank_0_evaluation, shown, index, margin) else ""
        ratio = number / expected if number and expected else 0.0
        if ratio in (self.num_ranks, 1 / self.num_ranks) and number.is_integer() and expected.is_integer():
            return ""  # for example the number of samples of an update
        if any(_is_near(number, expected * factor, margin) for factor in (self.num_ranks, 1 / self.num_ranks) if ratio):
            return f"{ratio:.3g} times that of one rank"
        if any(_has(lines, shown, index, margin) for lines in self.lines_of_other_ranks):
            return ""  # for example the largest or the smallest number of all ranks
        return _BETWEEN

    def is_of_training(self, shown: Printed, number: float, margin: _Margin) -> bool:
        """Whether a number is a loss, a learning rate or a gradient of rank 0, which are compared separately."""
        return (
            self.is_own_loss(shown, number, margin)
            or self.is_rate(shown, number, margin)
            or self.item(shown, number, margin)[1]
        )

    def is_own_loss(self, shown: Printed, number: float, margin: _Margin) -> bool:
        """Whether a number is rank 0's last loss, which may also depend on the samples of other ranks."""
        updates = self.many.ranks[0].updates
        if not 0 < shown.update <= len(updates) or not updates[shown.update - 1].losses:
            return False
        losses = updates[shown.update - 1].losses
        return any(_is_near(number, losses[-1] * ratio, margin) for ratio in {1, len(losses)})

    def is_rate(self, shown: Printed, number: float, margin: _Margin) -> bool:
        """Whether a number is a learning rate of rank 0, before or after its last step."""
        updates = self.many.ranks[0].updates[max(0, shown.update - 1) : shown.update + 1]
        return any(rate and _is_near(number, rate, (margin[0], 1e-4)) for update in updates for rate in update.rates)

    def item(self, shown: Printed, number: float, margin: _Margin) -> tuple[str, bool]:
        """The line that converted a tensor to a printed number, and whether it is a term of the rank's local loss."""
        items = [each for each in self.many.ranks[0].facts.get("items", []) if each[2] <= shown.update and each[1]]
        return next(
            ((line, is_own) for value, line, _, is_own in reversed(items) if _is_near(value, number, margin)),
            ("", False),
        )

    def is_of_each_rank(self, shown: Printed, index: int, margin: _Margin) -> bool:
        """Whether all ranks print this number and it differs between them, so that each prints its local number."""
        lines = [of_rank.get(_key(shown)) for of_rank in self.lines_by_rank[1:]]
        known = [line for line in lines if line is not None and len(line.numbers) == len(shown.numbers)]
        number = shown.numbers[index]
        return len(known) == len(lines) and not all(_is_near(line.numbers[index], number, margin) for line in known)

    def is_setting(self, shown: Printed, number: float, expected: float) -> bool:
        """Whether a number is the number of ranks, or an integer that is printed before training."""
        return (number, expected) == (self.num_ranks, 1) or (not shown.update and number.is_integer())

    def is_progress(self, line: Printed, index: int) -> bool:
        """Whether a number grows evenly with the updates on N ranks and on one rank, such as the samples so far."""
        return all(_grows_evenly(rank, line, index) for rank in (self.many.ranks[0], self.single))


def _grows_evenly(rank: RankRecording, line: Printed, index: int) -> bool:
    lines = [each for each in rank.printed if (each.place, each.stream) == (line.place, line.stream)]
    points = [(each.update, each.numbers[index]) for each in lines if len(each.numbers) == len(line.numbers)]
    (first, start), (last, end) = points[0], points[-1]
    if last == first:
        return False
    growth = (end - start) / (last - first)
    is_even = all(
        math.isclose(number, start + growth * (update - first), rel_tol=1e-6, abs_tol=1e-9) for update, number in points
    )
    return is_even and growth > 0 and (len(points) > 2 or math.isclose(start, growth * first, rel_tol=1e-6))


def _has(lines: dict[_Line, Printed], shown: Printed, index: int, margin: _Margin) -> bool:
    """Whether another run prints the same number in the same line."""
    line = lines.get(_key(shown))
    return (
        line is not None
        and len(line.numbers) == len(shown.numbers)
        and _is_near(shown.numbers[index], line.numbers[index], margin)
    )


def evaluates(rank: RankRecording) -> bool:
    """Whether a rank has read from a loader that it did not train on."""
    return any(key[0] not in rank.facts.get("training_loaders", []) for key, _, _ in rank.batches)


def _key(line: Printed) -> _Line:
    return line.place, line.occurrence, line.stream


def _margin(text: str, number: float, tolerance: float) -> _Margin:
    """(absolute, relative) tolerance of a printed number: its last digit, and rounding."""
    shown = [match for match in _SHOWN_NUMBER.finditer(text) if float(match[0]) == abs(number)]
    # an integer without an exponent, such as a count, has no rounded digit
    exponents = [int(match[2] or 0) - len(match[1] or "") for match in shown if match[1] or match[2]]
    return 1.01 * 10.0 ** min(exponents) if exponents else 0.5, max(tolerance, 1e-6)


def _is_near(first: float, second: float, margin: _Margin) -> bool:
    absolute, relative = margin
    return abs(first - second) <= absolute + relative * max(abs(first), abs(second))
