"""Compares the gradient that stepped with that of all samples of the update, in one process and in float64.

First it compares each backward with its replay. If these differ, the model was not run as before, because it has random
numbers or state of its own, and the gradient is not judged.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import Forward, ProcessStart, ReplayedUpdate, Unchecked
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings
from everyrank.audit.rules.loss_terms import times

__all__ = ["check_replay"]

_ROUNDING, _FAITHFUL = 1e-4, 1e-2  # relative: usual float32 rounding, and more than its worst
_COUPLED, _SAME = 1e-6, 1e-8  # between float64 gradients
_SHOWN = 3  # parameters
_UNCOUNTED = "the terms of the loss cannot be counted, so the scale is not judged"

Gradient = dict[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """How far the gradient of an update is from its replay, on the worst rank.

    distance  norm of the difference, relative to the replay
    rounding  what rounding explains of it: the weighted distances of the backwards from their replays
    factor    of the replay that fits best
    residual  the distance that remains with this factor
    far       the parameters that differ most
    """

    update: int
    distance: float
    rounding: float
    factor: float
    residual: float
    far: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return self.distance <= self.allowed

    @property
    def is_multiple(self) -> bool:
        return self.residual <= self.allowed

    @property
    def allowed(self) -> float:
        """A float32 step may round each backward, and their sum."""
        return _ROUNDING + 4 * self.rounding


def check_replay(evidence: Evidence, findings: Findings) -> None:
    """Judge each replayed update, or report why there is none."""
    if not any(event.replay for event in evidence.all_of(ProcessStart)):
        return
    if evidence.is_split:
        findings.not_checked("replay: layers are split over ranks (tensor or pipeline parallelism)")
        return
    events = evidence.all_of(ReplayedUpdate)
    if not events and not any("replay" in event.message for event in evidence.all_of(Unchecked)):
        findings.not_checked("replay: rank 0 ended before it could replay its updates")
    judged: list[tuple[ReplayedUpdate, _Verdict]] = []
    for event in events:
        verdict = _judge(evidence, event, findings)
        if verdict is None:
            break  # later updates would fail likewise
        judged.append((event, verdict))
    for is_weighted in (True, False):
        _report_verdicts(
            [verdict for event, verdict in judged if event.is_weighted == is_weighted],
            is_weighted,
            evidence,
            findings,
        )
    _report_coupling(evidence, [event for event, _ in judged], findings)


def _judge(evidence: Evidence, event: ReplayedUpdate, findings: Findings) -> _Verdict | None:
    """The verdict on an update; None, with a report, if its replay does not repeat what has run."""
    update, replayed = event.number, evidence.replayed(event.number)
    by_rank = {rank: evidence.samples(rank, update) for rank in evidence.ranks}
    recorded = [(rank, samples) for rank, samples in by_rank.items() if samples is not None]
    live = {f"{rank}.{micro}": piece for rank, samples in recorded for micro, piece in samples.pieces.items()}
    if set(live) != set(event.weights) or len(recorded) < len(by_rank):
        findings.not_checked(f"replay of update {update}: the recorded backwards are not those that step")
        return None
    steps = [{**samples.steps, **samples.clipped} for _, samples in recorded]
    if _differ_in_shape(*steps, *live.values(), *replayed.values()):
        findings.not_checked(f"replay of update {update}: several models have parameters of the same names")
        return None
    if event.coupling == "sends":
        return _of_one_batch(update, steps, replayed["merged"], findings)
    rounding, whole = 0.0, replayed["whole"]
    if not all(np.isfinite(_norm(gradient)) and _norm(gradient) for gradient in (*steps, *live.values(), whole)):
        findings.not_checked(f"replay of update {update}: a gradient is zero or not finite")
        return None
    for key, weight in event.weights.items():
        piece = replayed[f"backward.{key}"]
        distance = _distance(live[key], piece, live[key])
        if not distance <= _FAITHFUL:
            rank, _, micro = key.partition(".")
            findings.not_checked(
                f"replay of update {update}: backward {micro} of rank {rank} gives a different gradient when it is run "
                f"again in one process ({distance:.1e} away): it has different weights, or random numbers or state of "
                "its own"
            )
            return None
        rounding += abs(weight) * _distance(live[key], piece, whole)
    return _compare(update, steps, whole, rounding)


def _of_one_batch(update: int, steps: list[Gradient], merged: Gradient, findings: Findings) -> _Verdict | None:
    """The verdict on a model whose forward calls collectives, as SyncBatchNorm does: it only runs as one batch."""
    verdict = _compare(update, steps, merged, 0.0)
    if verdict is not None and verdict.residual <= _FAITHFUL:
        return dataclasses.replace(verdict, rounding=verdict.residual)
    findings.not_checked(f"replay of update {update}: the model calls collectives in its forward")
    return None


def _compare(update: int, steps: list[Gradient], whole: Gradient, rounding: float) -> _Verdict | None:
    names = [name for name in whole if all(name in step for step in steps)]
    expected = {name: whole[name] for name in names}
    if not names or not _norm(expected):
        return None
    worst: _Verdict | None = None
    for step in steps:
        square = sum(float(expected[name] @ expected[name]) for name in names)
        factor = sum(float(step[name] @ expected[name]) for name in names) / square
        scaled = {name: factor * value for name, value in expected.items()}
        off = {name: float(np.linalg.norm(step[name] - scaled[name])) for name in names}
        far = tuple(sorted(off, key=lambda name: -off[name])[:_SHOWN])
        verdict = _Verdict(
            update,
            _distance(step, expected, expected),
            rounding,
            factor,
            _distance(step, scaled, {name: step[name] for name in names}),
            far,
        )
        worst = verdict if worst is None or not verdict.distance <= worst.distance else worst
    return worst


def _report_verdicts(verdicts: list[_Verdict], is_weighted: bool, evidence: Evidence, findings: Findings) -> None:
    """Add a line for all updates that are equal, and one for the first that is not."""
    where = "in one process and float64: "
    ranks = f"of {evidence.world_size} rank{'s' if evidence.world_size > 1 else ''}"
    equal = [verdict for verdict in verdicts if (verdict.is_equal if is_weighted else verdict.is_multiple)]
    if equal:
        distance = max(verdict.distance if is_weighted else verdict.residual for verdict in equal)
        text = f"the gradient is equal to {distance:.0e}"
        if distance > _ROUNDING:
            cause = "see replicas.drift" if findings.has("replicas.drift") else "float32 rounding"
            text = f"the gradient is {distance:.0e} of its norm away, like each backward from its own replay ({cause})"
        if not is_weighted:
            text = f"the gradient is a multiple, equal to {distance:.0e}: {_UNCOUNTED}"
        findings.replayed.append(f"{_updates([verdict.update for verdict in equal])} {ranks} {where}{text}")
    if is_weighted:
        for verdict in [verdict for verdict in verdicts if not verdict.is_equal][:1]:
            _report_difference(verdict, f"update {verdict.update} {ranks} {where}", evidence, findings)
    elif len(equal) < len(verdicts):
        findings.not_checked(f"replay: the weight of each backward: {_UNCOUNTED}")


def _report_difference(verdict: _Verdict, prefix: str, evidence: Evidence, findings: Findings) -> None:
    """Report a gradient that differs; a finding only if no other rule explains it."""
    if verdict.is_multiple:
        text = f"the gradient is {times(verdict.factor)}"
    else:
        text = f"the gradient is {verdict.distance:.2g} of its norm away, most in {', '.join(verdict.far)}"
    kinds = ("gradient.", "clip.", "replicas.")
    named = [known.rule for kind in kinds for known in findings.worst_first() if known.rule.startswith(kind)]
    findings.replayed.append(prefix + text + (f" (see {named[0]})" if named else ""))
    if not named and verdict.distance > _FAITHFUL and verdict.update not in evidence.after_jumps:
        line = evidence.steps[verdict.update][evidence.ranks[0]].line if verdict.update in evidence.steps else ""
        fix = "find the code that changes .grad between backward and step"
        findings.add("WARN", "replay.differs", line, f"{prefix}{text}", fix)


def _report_coupling(evidence: Evidence, events: list[ReplayedUpdate], findings: Findings) -> None:
    """Report how much the gradient changes because batch norm sees only a part of an update's samples."""
    distances: dict[int, float] = {}
    for event in events:
        replayed = evidence.replayed(event.number)
        if event.coupling and event.coupling != "sends":
            findings.not_checked(f"replay: the effect of batch norm: {event.coupling}")
        elif "merged" in replayed and "without_dropout" in replayed:
            merged, separate = replayed["merged"], replayed["without_dropout"]
            if _distance(replayed["merged_local_norm"], separate, separate) > _SAME:
                findings.not_checked("replay: the effect of batch norm: something else depends on the batch, too")
            else:
                distances[event.number] = _distance(separate, merged, merged)
    if not distances or max(distances.values()) <= _COUPLED:
        return
    sizes, forwards = events[0].sizes, evidence.of(evidence.ranks[0], Forward)
    line = next((event.line for event in forwards if event.is_grad), "")
    least, most = min(distances.values()), max(distances.values())
    moved = f"{least:.1%}" if f"{least:.1%}" == f"{most:.1%}" else f"{least:.1%} to {most:.1%}"
    text = f"{_updates(list(distances))}: batch norm uses {max(sizes)} samples at a time, not the {sum(sizes)} of an "
    text += f"update, which changes the gradient by {moved} of its norm" + (
        " (without dropout)" if events[0].without_dropout else ""
    )
    fix = "SyncBatchNorm.convert_sync_batchnorm(model) uses the samples of all ranks"
    if evidence.world_size == 1:
        fix = "use more samples in each backward, or GroupNorm, which normalises each sample by itself"
    findings.add("NOTE", "replay.batchnorm", line, text, fix)


def _updates(numbers: list[int]) -> str:
    return f"update {numbers[0]}" if len(numbers) == 1 else f"updates {min(numbers)} to {max(numbers)}"


def _distance(first: Gradient, second: Gradient, whole: Gradient) -> float:
    """The distance between two gradients, relative to the norm of `whole`; a missing tensor is zero."""
    names = set(first) & set(whole) | set(second) & set(whole)
    difference = {name: first.get(name, 0.0 * whole[name]) - second.get(name, 0.0 * whole[name]) for name in names}
    return _norm(difference) / max(_norm(whole), 1e-300)


def _differ_in_shape(*gradients: Gradient) -> bool:
    shapes = [(name, value.shape) for gradient in gradients for name, value in gradient.items()]
    return len(set(shapes)) > len(dict(shapes))


def _norm(gradient: Gradient) -> float:
    return float(np.sqrt(sum(float(value @ value) for value in gradient.values())))
