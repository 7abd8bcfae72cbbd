"""Results of an evaluation that the ranks sum or average although they are not means over equally many samples.

F1, precision and accuracy of unequal shards are ratios, by a different count on each rank. A perplexity is an
exponential.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from everyrank.audit.events import CollectiveCall, EvalLoss, ReduceResult
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_place
from everyrank.audit.rules.evaluation import loss_passes

__all__ = ["check_averages"]

_EQUAL, _ROUNDED = 1e-3, 1e-5  # relative
_SUM, _AVERAGE = "0", "1"  # operators, by their numbers in torch


def check_averages(evidence: Evidence, findings: Findings) -> None:
    """Check each number that all ranks reduce in an evaluation."""
    if evidence.world_size < 2 or evidence.is_split:
        return
    means = [[_mean(events) for events in loss_passes(evidence, rank)] for rank in evidence.ranks]
    for results in _results(evidence):
        values = [result.value for _, result in results]
        if not all(map(math.isfinite, values)) or math.isclose(min(values), max(values), rel_tol=_EQUAL):
            continue
        if all(result.is_exponential for _, result in results) or _are_exponentials(values, means):
            text = "each rank's exponential of its mean loss (a perplexity) is summed over the ranks"
            fix = "all-reduce the sum and the count of the losses, divide, and then take the exponential"
        else:
            text, fix = (
                _ratios([result for _, result in results]),
                "all-reduce numerators and denominators, then divide",
            )
        if text:
            shown = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in zip(evidence.ranks, values, strict=True))
            findings.add("WARN", "eval.averaged", results[0][0], f"{text}: {shown}", fix)
    _report_equal_counts(evidence, findings)


def _report_equal_counts(evidence: Evidence, findings: Findings) -> None:
    """Report ratios by a count that was equal on all ranks, but changes: it may be each rank's own."""
    counts: dict[str, set[float]] = defaultdict(set)
    for results in _results(evidence):
        denominators = {result.denominator or 0.0 for _, result in results}
        counts[results[0][0]] |= denominators if len(denominators) == 1 else {math.nan}
    for line, denominators in counts.items():
        if len(denominators) > 1 and all(count.is_integer() for count in denominators):
            shown = ", ".join(f"{count:g}" for count in sorted(denominators))
            findings.not_checked(
                f"the ratio that is averaged at {short_place(line)}: its denominator ({shown}) was equal on all ranks "
                "so far; if it can differ, as in F1, sum numerators and denominators instead"
            )


def _results(evidence: Evidence) -> Iterator[tuple[tuple[str, ReduceResult], ...]]:
    """The all-reduces of one number in evaluations, by line and in order: the line and the number of each rank."""
    by_rank: list[dict[str, list[tuple[str, ReduceResult]]]] = []
    for rank in evidence.ranks:
        by_line: dict[str, list[tuple[str, ReduceResult]]] = defaultdict(list)
        for event in evidence.of(rank, CollectiveCall):
            if event.result is not None and event.reduction in (_SUM, _AVERAGE) and event.lines:
                by_line[event.line].append((event.line, event.result))
        by_rank.append(by_line)
    for line in by_rank[0]:
        yield from zip(*(by_line[line] for by_line in by_rank), strict=False)


def _ratios(results: Sequence[ReduceResult]) -> str:
    """A sentence where these are ratios by different counts, whose mean is not the ratio over all ranks; else ""."""
    numerators = [result.numerator or 0.0 for result in results]
    counts = [result.denominator or 0.0 for result in results]
    if any(not count.is_integer() or count <= 0 for count in counts):
        return ""
    mean = sum(result.value for result in results) / len(results)
    over_all = sum(numerators) / sum(counts)
    if len(set(counts)) == 1 or math.isclose(mean, over_all, rel_tol=_EQUAL):
        return ""
    shown = " and ".join(f"{count:g}" for count in counts)
    return f"each rank's ratio, by {shown}, is averaged: the mean is {mean:.6g}, the ratio over all {over_all:.6g}"


def _are_exponentials(values: Sequence[float], means: Sequence[Sequence[float]]) -> bool:
    """Whether each is the exponential of a mean loss of an evaluation of that rank."""
    return all(
        any(value > 0 and math.isclose(math.log(value), mean, rel_tol=_ROUNDED) for mean in of_rank)
        for value, of_rank in zip(values, means, strict=True)
    )


def _mean(events: Sequence[EvalLoss]) -> float:
    return sum(event.value * event.terms for event in events) / max(1, sum(event.terms for event in events))
