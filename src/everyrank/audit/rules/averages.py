"""Finds evaluation results that the ranks sum or average, although they are not means over equally many samples.

F1, precision, and accuracy on unequal shards are ratios, and their denominator differs between ranks. A perplexity is
an exponential.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from everyrank.audit.events import CollectiveCall, EvalLoss, ReduceResult
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_location
from everyrank.audit.rules.evaluation import losses_by_evaluation

__all__ = ["check_averages"]

_EQUAL_TOLERANCE, _ROUNDING_TOLERANCE = 1e-3, 1e-5  # relative
_SUM, _AVERAGE = "0", "1"  # numbers of the ReduceOps in torch


def check_averages(evidence: Evidence, findings: Findings) -> None:
    """Check each number that all ranks reduce in an evaluation."""
    if evidence.world_size < 2 or evidence.is_split:
        return
    means = [[_mean_loss(events) for events in losses_by_evaluation(evidence, rank)] for rank in evidence.ranks]
    for results in _reduced_results(evidence):
        values = [result.value for _, result in results]
        if not all(map(math.isfinite, values)) or math.isclose(min(values), max(values), rel_tol=_EQUAL_TOLERANCE):
            continue
        if all(result.is_exponential for _, result in results) or _are_exponentials(values, means):
            text = "each rank takes the exponential of its own mean loss (a perplexity), and the ranks sum these"
            fix = "all-reduce the sum and the count of the losses, divide, and then take the exponential"
        else:
            text, fix = (
                _ratio_mistake([result for _, result in results]),
                "all-reduce numerators and denominators, then divide",
            )
        if text:
            shown_values = ", ".join(
                f"{value:.6g} on rank {rank}" for rank, value in zip(evidence.ranks, values, strict=True)
            )
            findings.add("WARN", "eval.averaged", results[0][0], f"{text}: {shown_values}", fix)
    _report_equal_counts(evidence, findings)


def _report_equal_counts(evidence: Evidence, findings: Findings) -> None:
    """Report ratios whose denominator changes, but was equal on all ranks so far: it may be a local count."""
    counts: dict[str, set[float]] = defaultdict(set)
    for results in _reduced_results(evidence):
        denominators = {result.denominator or 0.0 for _, result in results}
        counts[results[0][0]] |= denominators if len(denominators) == 1 else {math.nan}
    for line, denominators in counts.items():
        if len(denominators) > 1 and all(count.is_integer() for count in denominators):
            shown_counts = ", ".join(f"{count:g}" for count in sorted(denominators))
            findings.add_unchecked(
                f"the ratio that is averaged at {short_location(line)}: its denominator ({shown_counts}) was equal on "
                "all ranks so far. If it can differ, as in F1, sum numerators and denominators instead"
            )


def _reduced_results(evidence: Evidence) -> Iterator[tuple[tuple[str, ReduceResult], ...]]:
    """Yield the all-reduces of one number in evaluations, line by line and in order: (line, number) of each rank."""
    by_rank: list[dict[str, list[tuple[str, ReduceResult]]]] = []
    for rank in evidence.ranks:
        by_line: dict[str, list[tuple[str, ReduceResult]]] = defaultdict(list)
        for event in evidence.of(rank, CollectiveCall):
            if event.result is not None and event.reduction in (_SUM, _AVERAGE) and event.lines:
                by_line[event.line].append((event.line, event.result))
        by_rank.append(by_line)
    for line in by_rank[0]:
        yield from zip(*(by_line[line] for by_line in by_rank), strict=False)


def _ratio_mistake(results: Sequence[ReduceResult]) -> str:
    """Describe ratios with different denominators whose mean is not the ratio over all ranks; "" for others."""
    numerators = [result.numerator or 0.0 for result in results]
    denominators = [result.denominator or 0.0 for result in results]
    if any(not count.is_integer() or count <= 0 for count in denominators):
        return ""
    if len({result.factor for result in results}) > 1:
        return ""  # each rank multiplies its ratio by its share of the samples, so the sum is the ratio over all ranks
    mean = sum(result.value for result in results) / len(results)
    ratio_of_sums = sum(numerators) / sum(denominators)
    if len(set(denominators)) == 1 or math.isclose(mean, ratio_of_sums, rel_tol=_EQUAL_TOLERANCE):
        return ""
    shown_counts = " and ".join(f"{count:g}" for count in denominators)
    return (
        f"the ranks average ratios with different denominators ({shown_counts}): the mean is {mean:.6g}, but the ratio "
        f"over all ranks is {ratio_of_sums:.6g}"
    )


def _are_exponentials(values: Sequence[float], means: Sequence[Sequence[float]]) -> bool:
    """Whether each value is the exponential of the mean loss of one of that rank's evaluations."""
    return all(
        any(value > 0 and math.isclose(math.log(value), mean, rel_tol=_ROUNDING_TOLERANCE) for mean in rank_means)
        for value, rank_means in zip(values, means, strict=True)
    )


def _mean_loss(events: Sequence[EvalLoss]) -> float:
    return sum(event.value * event.terms for event in events) / max(1, sum(event.terms for event in events))
