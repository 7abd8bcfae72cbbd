"""Whether gradients are clipped when they are whole: averaged, and no longer multiplied by the loss scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from everyrank.audit.events import Clip, Collective
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_clipping"]

_SAME_NORM = 1e-4  # relative
_SAME_SUM = 1e-5
_UPDATES = 3  # that have to agree


def check_clipping(evidence: Evidence, findings: Findings) -> None:
    """The scale at each clip, and the norms that the ranks found."""
    for event in evidence.all_of(Clip):
        if event.scale != 1.0:
            findings.add(
                "FAIL",
                "clip.scaled",
                event.line,
                f"clips gradients that are still multiplied by the loss scale {event.scale:g}",
                "scaler.unscale_(optimizer) before clip_grad_norm_",
            )
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
                f"the ranks clip by different norms ({', '.join(f'{norm:.4g}' for norm in norms)}): before the "
                "gradients are averaged, or of a shard alone",
                "clip after the last backward of an update, which averages",
            )


def _check_norm_of_parts(evidence: Evidence, findings: Findings) -> None:
    """A sum of squares that the script adds up over ranks which hold parts of layers: each number once.

    Those of parameters that all ranks hold alike count on one of them; those that are split, on each.
    """
    said: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    sums = [[one for one in evidence.of(rank, Collective) if one.squares] for rank in evidence.ranks]
    for events in zip(*sums, strict=False):
        text = _about_squares([event.value for event in events], [event.squares for event in events])
        lines = events[0].lines
        if text and lines:
            said[lines[0], text[0]].append((text[1], lines[1] if len(lines) > 1 else ""))
    for (line, fix), found in said.items():
        if len(found) >= _UPDATES:
            findings.add("WARN", "clip.norm", line, found[0][0], fix, (found[0][1],))


def _about_squares(sent: Sequence[float], squares: Sequence[dict[str, float]]) -> tuple[str, str] | None:
    """(the fix, what is wrong) of the number that each rank sends; None where it is no such sum, or a right one."""
    names = list(squares[0])
    if any(set(own) != set(names) for own in squares):
        return None
    alike = [name for name in names if all(_is_near(own[name], squares[0][name]) for own in squares)]
    split = [name for name in names if name not in alike]
    replicated = sum(squares[0][name] for name in alike)
    if not split or not all(math.isfinite(one) and one > 0 for one in sent):
        return None
    if alike and replicated > 1e-3 * sent[0] and all(map(_is_near, sent, [sum(own.values()) for own in squares])):
        total = sum(sent)
        right = math.sqrt(max(0.0, total - (len(sent) - 1) * replicated))
        return (
            "add up the squares of split parameters over the ranks, and those of replicated ones once",
            f"the squares of all gradients are added up over the ranks: those of {len(alike)} parameters that all "
            f"ranks hold alike ({', '.join(alike[:3])}) count {len(sent)} times: a norm of {math.sqrt(total):.6g}, and "
            f"it is {right:.6g}",
        )
    for name in split:
        others = [sum(own[one] for one in split if one != name) for own in squares[1:]]
        if _is_near(sent[0], sum(squares[0].values())) and all(map(_is_near, sent[1:], others)):
            return (
                "count the squares of split parameters on every rank",
                f"the squares of {name}, of which each rank has a gradient of its own, are counted on rank 0 alone, as "
                "those of a parameter that all ranks hold alike",
            )
    return None


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_SUM * max(abs(one), abs(other))
