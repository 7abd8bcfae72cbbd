"""Results of an evaluation that the ranks add up or average, though they are no means over as many samples.

F1, precision, accuracy of unequal shards: ratios, each rank by a count of its own. Perplexity: an exponential.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from everyrank.audit.evidence import Event, Evidence
from everyrank.audit.finding import Findings, short_place
from everyrank.audit.rules.evaluation import loss_passes

__all__ = ["check_averages"]

_EQUAL, _ROUNDED = 1e-3, 1e-5  # relative
_SUM, _AVERAGE = "0", "1"  # operators, by their numbers in torch


def check_averages(evidence: Evidence, findings: Findings) -> None:
    """Each number that all ranks send in an evaluation, held against what it is of."""
    if evidence.world_size < 2 or evidence.is_split:
        return
    means = [[_mean(events) for events in loss_passes(evidence, rank)] for rank in evidence.ranks]
    for events in _results(evidence):
        values = [event["result"]["value"] for event in events]
        if not all(map(math.isfinite, values)) or math.isclose(min(values), max(values), rel_tol=_EQUAL):
            continue
        if all(event["result"].get("is_exponential") for event in events) or _are_exponentials(values, means):
            text = "an exponential of a rank's own mean (a perplexity) is added up over the ranks"
            fix = "all-reduce the sum and the count of the losses, divide, and only then take the exponential"
        else:
            text, fix = _ratios(events), "all-reduce the counts above and below the line, then divide"
        if text:
            shown = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in zip(evidence.ranks, values, strict=True))
            findings.add("WARN", "eval.averaged", events[0]["lines"][0], f"{text}: {shown}", fix)
    _say_equal_counts(evidence, findings)


def _say_equal_counts(evidence: Evidence, findings: Findings) -> None:
    """Ratios by a count that was the same on all ranks, and another in the next evaluation: of what, is not known."""
    counts: dict[str, set[float]] = defaultdict(set)
    for events in _results(evidence):
        below = {event["result"].get("below", 0.0) for event in events}
        counts[events[0]["lines"][0]] |= below if len(below) == 1 else {math.nan}
    for line, own in counts.items():
        if len(own) > 1 and all(count.is_integer() for count in own):
            shown = ", ".join(f"{count:g}" for count in sorted(own))
            findings.not_checked(
                f"the ratio that is averaged at {short_place(line)}: the count below the line ({shown}) was the same "
                "on all ranks in what ran; where it is each rank's own, as in F1, add up the counts instead"
            )


def _results(evidence: Evidence) -> Iterator[tuple[Event, ...]]:
    """The all-reduces of one number in evaluations, by line and in order: that of each rank."""
    own: list[dict[str, list[Event]]] = []
    for rank in evidence.ranks:
        found: dict[str, list[Event]] = defaultdict(list)
        for event in evidence.of(rank, "collective"):
            if "result" in event and event["reduction"] in (_SUM, _AVERAGE) and event["lines"]:
                found[event["lines"][0]].append(event)
        own.append(found)
    for line in own[0]:
        yield from zip(*(found[line] for found in own), strict=False)


def _ratios(events: Sequence[Event]) -> str:
    """The words where these are ratios by counts that differ, and their mean is another number than that of all."""
    parts = [event["result"] for event in events]
    if any(not float(part.get("below", 0.5)).is_integer() or part["below"] <= 0 for part in parts):
        return ""
    mean = sum(part["value"] for part in parts) / len(parts)
    of_all = sum(part["above"] for part in parts) / sum(part["below"] for part in parts)
    if len({part["below"] for part in parts}) == 1 or math.isclose(mean, of_all, rel_tol=_EQUAL):
        return ""
    counts = " and ".join(f"{part['below']:g}" for part in parts)
    return f"a rank's own ratio, by {counts}, is added up over the ranks; their mean is {mean:.6g}, of all {of_all:.6g}"


def _are_exponentials(values: Sequence[float], means: Sequence[Sequence[float]]) -> bool:
    """Whether each is the exponential of a mean loss of an evaluation of that rank."""
    return all(
        any(value > 0 and math.isclose(math.log(value), mean, rel_tol=_ROUNDED) for mean in own)
        for value, own in zip(values, means, strict=True)
    )


def _mean(events: Sequence[Event]) -> float:
    return sum(event["value"] * event["terms"] for event in events) / max(1, sum(event["terms"] for event in events))
