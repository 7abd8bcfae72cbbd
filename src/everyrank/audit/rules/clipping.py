"""Clipping: after the gradients are averaged over ranks, and after the loss scale is removed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from everyrank.audit.events import Clip, CollectiveCall
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_clipping"]

_SAME_NORM = 1e-4  # relative
_SAME_SUM = 1e-5
_UPDATES = 3  # that have to agree


def check_clipping(evidence: Evidence, findings: Findings) -> None:
    """Check the loss scale at each clip, and the norms of the ranks."""
    for event in evidence.all_of(Clip):
        if event.scale != 1.0:
            findings.add(
                "FAIL",
                "clip.scaled",
                event.line,
                f"clips gradients that are still multiplied by the loss scale {event.scale:g}",
                "call scaler.unscale_(optimizer) before clip_grad_norm_",
            )
    _check_nothing_clipped(evidence, findings)
    if evidence.is_split:
        _check_norm_of_parts(evidence, findings)
        return
    for events in zip(*(evidence.of(rank, Clip) for rank in evidence.ranks), strict=False):
        norms = [event.norm for event in events if event.norm is not None and math.isfinite(event.norm)]
        if len(norms) == len(events) > 1 and max(norms) - min(norms) > _SAME_NORM * max(norms):
            findings.add(
                "FAIL",
                "clip.local",
                events[0].line,
                f"the ranks clip by different norms ({', '.join(f'{norm:.4g}' for norm in norms)}): the gradients "
                "are not averaged yet, or the norm is that of a shard",
                "clip after the last backward of an update, which averages the gradients",
            )


def _check_nothing_clipped(evidence: Evidence, findings: Findings) -> None:
    """Find calls whose norm is always 0: the parameters have no gradient there, or another tensor has it."""
    by_line: dict[str, list[float | None]] = defaultdict(list)
    for event in evidence.all_of(Clip):
        by_line[event.line].append(event.norm)
    is_trained = any(not step.is_zero for steps in evidence.steps.values() for step in steps.values())
    for line, norms in by_line.items():
        if is_trained and len(norms) >= _UPDATES and all(norm == 0 for norm in norms):
            findings.add(
                "WARN",
                "clip.nothing",
                line,
                f"clips nothing: the parameters have no gradient here, and the norm is 0 in all {len(norms)} calls",
                "clip between backward and step; under DeepSpeed set gradient_clipping in its configuration",
            )


def _check_norm_of_parts(evidence: Evidence, findings: Findings) -> None:
    """Check a norm that the script computes over split layers: it has to count each element once.

    The squares of replicated parameters count on one rank, those of split parameters on every rank.
    """
    mistakes: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    sums = [[event for event in evidence.of(rank, CollectiveCall) if event.squares] for rank in evidence.ranks]
    for events in zip(*sums, strict=False):
        text = _about_squares([event.value for event in events], [event.squares for event in events])
        lines = events[0].lines
        if text and lines:
            mistakes[lines[0], text[0]].append((text[1], lines[1] if len(lines) > 1 else ""))
    for (line, fix), texts in mistakes.items():
        if len(texts) >= _UPDATES:
            findings.add("WARN", "clip.norm", line, texts[0][0], fix, (texts[0][1],))


def _about_squares(sent: Sequence[float], squares: Sequence[dict[str, float]]) -> tuple[str, str] | None:
    """(fix, text) for a wrong sum of squares that each rank sends; None if it is right, or not such a sum."""
    names = list(squares[0])
    if any(set(of_rank) != set(names) for of_rank in squares):
        return None
    equal = [name for name in names if all(_is_near(of_rank[name], squares[0][name]) for of_rank in squares)]
    split = [name for name in names if name not in equal]
    replicated = sum(squares[0][name] for name in equal)
    if not split or not all(math.isfinite(value) and value > 0 for value in sent):
        return None
    if (
        equal
        and replicated > 1e-3 * sent[0]
        and all(map(_is_near, sent, [sum(of_rank.values()) for of_rank in squares]))
    ):
        total = sum(sent)
        right = math.sqrt(max(0.0, total - (len(sent) - 1) * replicated))
        return (
            "sum the squares of split parameters over the ranks, and count those of replicated parameters once",
            f"the squares of all gradients are summed over the ranks, so {len(equal)} replicated parameters "
            f"({', '.join(equal[:3])}) count {len(sent)} times: the norm is {math.sqrt(total):.6g}, not {right:.6g}",
        )
    for name in split:
        others = [sum(of_rank[other] for other in split if other != name) for of_rank in squares[1:]]
        if _is_near(sent[0], sum(squares[0].values())) and all(map(_is_near, sent[1:], others)):
            return (
                "count the squares of split parameters on every rank",
                f"the squares of {name} are only counted on rank 0, as if it were replicated, but each rank has a "
                "different gradient",
            )
    return None


def _is_near(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME_SUM * max(abs(first), abs(second))
