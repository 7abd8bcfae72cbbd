"""Checks that gradients are clipped before the step, after they are averaged, and without the loss scale."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from everyrank.audit.data_flow import called_name, read_source
from everyrank.audit.events import Clip, CollectiveCall
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_clipping"]

_NORM_TOLERANCE = 1e-4  # relative
_SUM_TOLERANCE = 1e-5
_MIN_UPDATES = 3  # that have to agree


def check_clipping(evidence: Evidence, findings: Findings) -> None:
    """Check the loss scale of clipped gradients, whether a step uses them, and whether all ranks clip by one norm."""
    for event in evidence.all_of(Clip):
        if event.scale != 1.0:
            findings.add(
                "FAIL",
                "clip.scaled",
                event.line,
                f"the gradients are clipped while they are still multiplied by the loss scale {event.scale:g}",
                "call scaler.unscale_(optimizer) before clip_grad_norm_",
            )
    _check_nothing_clipped(evidence, findings)
    _check_late(evidence, findings)
    if evidence.is_split:
        _check_split_norm(evidence, findings)
        return
    if evidence.averages_parameters:
        return  # each rank steps with its local gradient, which it clips, and the parameters are averaged later
    calls_by_rank = [_calls_by_number(evidence.of(rank, Clip)) for rank in evidence.ranks]
    for key in calls_by_rank[0]:
        events = [calls[key] for calls in calls_by_rank if key in calls]
        norms = [event.norm for event in events if event.norm is not None and math.isfinite(event.norm)]
        if len(norms) == evidence.world_size > 1 and max(norms) - min(norms) > _NORM_TOLERANCE * max(norms):
            findings.add(
                "FAIL",
                "clip.local",
                events[0].line,
                f"the ranks clip by different norms ({', '.join(f'{norm:.4g}' for norm in norms)}): the gradients "
                "are not averaged yet, or each rank computes the norm of its shard",
                "clip after the last backward of an update, which averages the gradients",
            )


def _calls_by_number(events: Sequence[Clip]) -> dict[tuple[str, int, int], Clip]:
    """The calls by line, update and number in the update: one rank may have more calls, for example for its log."""
    numbers: Counter[tuple[str, int]] = Counter()
    calls: dict[tuple[str, int, int], Clip] = {}
    for event in events:
        calls[event.line, event.update, numbers[event.line, event.update]] = event
        numbers[event.line, event.update] += 1
    return calls


def _check_nothing_clipped(evidence: Evidence, findings: Findings) -> None:
    """Find clipping whose norm is always 0: the parameters have no gradient yet, or another tensor has it."""
    by_line: dict[str, list[float | None]] = defaultdict(list)
    for event in evidence.all_of(Clip):
        by_line[event.line].append(event.norm)
    is_trained = any(not step.is_zero for steps in evidence.steps.values() for step in steps.values())
    for line, norms in by_line.items():
        if is_trained and len(norms) >= _MIN_UPDATES and all(norm == 0 for norm in norms):
            findings.add(
                "WARN",
                "clip.nothing",
                line,
                f"clipping has no effect: the parameters have no gradient here, so the norm is 0 in all {len(norms)} "
                "calls",
                "clip between backward and step; with DeepSpeed, set gradient_clipping in its configuration",
            )


def _check_late(evidence: Evidence, findings: Findings) -> None:
    """Find clipping after the optimizer step, which has no effect, because each step uses gradients of new backwards.

    A call with an infinite limit clips nothing: it only returns the norm, for a log.
    """
    late_calls: dict[str, list[Clip]] = defaultdict(list)
    for event in evidence.late_clips:
        if event.norm and not _is_carried(evidence, event):
            late_calls[event.line].append(event)
    for line, events in late_calls.items():
        num_others = sum(event.line == line and event.micro > 0 for event in evidence.all_of(Clip))
        if len(events) >= _MIN_UPDATES and not num_others and not _names_infinity(line):
            findings.add(
                "WARN",
                "clip.late",
                line,
                f"in all {len(events)} calls the gradients are clipped after the optimizer step, and no later step uses"
                " them; ignore this if only the norm is used",
                "clip between backward and step",
            )


def _is_carried(evidence: Evidence, clip: Clip) -> bool:
    """Whether the next backward adds its gradient to the clipped one, because zero_grad is not called."""
    samples = evidence.gradient_samples(clip.rank, clip.update)
    return samples is not None and any(value.any() for value in samples.carried.values())


def _names_infinity(location: str) -> bool:
    """Whether the call at this location has an infinite argument."""
    path, _, number = location.rpartition(":")
    source = read_source(path)
    statement = source.at(int(number)) if source is not None else None
    calls = [ast.unparse(call) for call in statement.calls if "clip" in called_name(call)] if statement else []
    return any(re.search(r"\binf(inity)?\b", call, re.IGNORECASE) for call in calls)


def _check_split_norm(evidence: Evidence, findings: Findings) -> None:
    """Check a gradient norm that the script computes over split layers: it has to count each element once.

    The squares of replicated parameters have to count on one rank, those of split parameters on every rank.
    """
    mistakes: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    sums_by_rank = [[event for event in evidence.of(rank, CollectiveCall) if event.squares] for rank in evidence.ranks]
    for events in zip(*sums_by_rank, strict=False):
        mistake = _squares_mistake([event.value for event in events], [event.squares for event in events])
        lines = events[0].lines
        if mistake and lines:
            mistakes[lines[0], mistake[0]].append((mistake[1], lines[1] if len(lines) > 1 else ""))
    for (line, fix), texts in mistakes.items():
        if len(texts) >= _MIN_UPDATES:
            findings.add("WARN", "clip.norm", line, texts[0][0], fix, (texts[0][1],))


def _squares_mistake(sent: Sequence[float], squares: Sequence[dict[str, float]]) -> tuple[str, str] | None:
    """(fix, text) if the numbers that the ranks send are a wrong sum of squares; None for all other numbers."""
    names = list(squares[0])
    if any(set(rank_squares) != set(names) for rank_squares in squares):
        return None
    replicated_names = [
        name for name in names if all(_is_near(rank_squares[name], squares[0][name]) for rank_squares in squares)
    ]
    split_names = [name for name in names if name not in replicated_names]
    replicated_squares = sum(squares[0][name] for name in replicated_names)
    if not split_names or not all(math.isfinite(value) and value > 0 for value in sent):
        return None
    if (
        replicated_names
        and replicated_squares > 1e-3 * sent[0]
        and all(map(_is_near, sent, [sum(rank_squares.values()) for rank_squares in squares]))
    ):
        total = sum(sent)
        correct_norm = math.sqrt(max(0.0, total - (len(sent) - 1) * replicated_squares))
        return (
            "sum the squares of split parameters over the ranks, and count those of replicated parameters once",
            f"the squares of all gradients are summed over the ranks, so {len(replicated_names)} replicated parameters "
            f"({', '.join(replicated_names[:3])}) count {len(sent)} times: the norm is {math.sqrt(total):.6g} instead "
            f"of {correct_norm:.6g}",
        )
    for name in split_names:
        other_sums = [
            sum(rank_squares[other] for other in split_names if other != name) for rank_squares in squares[1:]
        ]
        if _is_near(sent[0], sum(squares[0].values())) and all(map(_is_near, sent[1:], other_sums)):
            return (
                "count the squares of split parameters on every rank",
                f"the squares of {name} count only on rank 0, as if it were replicated, but each rank has a "
                "different gradient",
            )
    return None


def _is_near(first: float, second: float) -> bool:
    return abs(first - second) <= _SUM_TOLERANCE * max(abs(first), abs(second))
