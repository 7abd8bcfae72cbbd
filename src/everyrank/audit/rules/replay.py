"""Compares the gradient of an optimizer step with that of all its samples, computed in one process and float64.

First it compares each backward with its replay. If these differ, the model did not run as before, for example because
it has random numbers or state of its own. Then the gradient is not judged.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import Forward, ProcessStart, ReplayedUpdate, Unchecked
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings
from everyrank.audit.rules.loss_terms import scale_error

__all__ = ["check_replay"]

_USUAL_ROUNDING, _MAX_ROUNDING = 1e-4, 1e-2  # relative: usual float32 rounding, and more than its worst
_COUPLING_TOLERANCE, _FLOAT64_TOLERANCE = 1e-6, 1e-8  # between float64 gradients
_MAX_NAMES = 3  # parameters
_UNCOUNTED = "the terms of the loss cannot be counted, so the scale is not checked"

Gradient = dict[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """The difference between the gradient of an update and its replay, on the rank where it is largest.

    distance        norm of the difference, relative to the replay
    rounding        the part that rounding explains: the weighted distances of the backwards from their replays
    factor          the multiple of the replay that fits best
    residual        the distance from this multiple
    farthest_names  the parameters that differ most
    """

    update: int
    distance: float
    rounding: float
    factor: float
    residual: float
    farthest_names: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return self.distance <= self.allowed

    @property
    def is_multiple(self) -> bool:
        return self.residual <= self.allowed

    @property
    def allowed(self) -> float:
        """The largest distance that rounding explains: a float32 step may round each backward, and their sum."""
        return _USUAL_ROUNDING + 4 * self.rounding


def check_replay(evidence: Evidence, findings: Findings) -> None:
    """Check each replayed update, or report why none was replayed."""
    if not any(event.replay for event in evidence.all_of(ProcessStart)):
        return
    if evidence.is_split:
        findings.add_unchecked("replay: layers are split over ranks (tensor or pipeline parallelism)")
        return
    events = evidence.all_of(ReplayedUpdate)
    if not events and not any("replay" in event.message for event in evidence.all_of(Unchecked)):
        findings.add_unchecked("replay: rank 0 ended before it could replay its updates")
    judged: list[tuple[ReplayedUpdate, _Verdict]] = []
    for event in events:
        verdict = _judge(evidence, event, findings)
        if verdict is None:
            break  # later updates would fail for the same reason
        judged.append((event, verdict))
    for has_term_weights in (True, False):
        _report_verdicts(
            [verdict for event, verdict in judged if event.has_term_weights == has_term_weights],
            has_term_weights,
            evidence,
            findings,
        )
    _report_batch_norm(evidence, [event for event, _ in judged], findings)


def _judge(evidence: Evidence, event: ReplayedUpdate, findings: Findings) -> _Verdict | None:
    """The verdict on an update; None, with a report, if its replay differs from what has run."""
    update, replayed = event.number, evidence.replayed(event.number)
    by_rank = {rank: evidence.gradient_samples(rank, update) for rank in evidence.ranks}
    known_samples = [(rank, samples) for rank, samples in by_rank.items() if samples is not None]
    recorded_backwards = {
        f"{rank}.{micro}": gradient for rank, samples in known_samples for micro, gradient in samples.backwards.items()
    }
    if set(recorded_backwards) != set(event.weights) or len(known_samples) < len(by_rank):
        findings.add_unchecked(f"replay of update {update}: the recorded backwards are not those of the optimizer step")
        return None
    step_gradients = [{**samples.steps, **samples.clipped} for _, samples in known_samples]
    if _differ_in_shape(*step_gradients, *recorded_backwards.values(), *replayed.values()):
        findings.add_unchecked(f"replay of update {update}: several models have parameters of the same names")
        return None
    if event.batch_norm_failure == "sends":
        return _judge_as_one_batch(update, step_gradients, replayed["merged"], findings)
    rounding, total_gradient = 0.0, replayed["whole"]
    if not all(
        np.isfinite(_norm(gradient)) and _norm(gradient)
        for gradient in (*step_gradients, *recorded_backwards.values(), total_gradient)
    ):
        findings.add_unchecked(f"replay of update {update}: a gradient is zero or not finite")
        return None
    for key, weight in event.weights.items():
        gradient = replayed[f"backward.{key}"]
        distance = _distance(recorded_backwards[key], gradient, recorded_backwards[key])
        if not distance <= _MAX_ROUNDING:
            rank, _, micro = key.partition(".")
            findings.add_unchecked(
                f"replay of update {update}: backward {micro} of rank {rank} gives a different gradient when it is run "
                f"again in one process ({distance:.1e} away): it has different weights, or random numbers or state of "
                "its own"
            )
            return None
        rounding += abs(weight) * _distance(recorded_backwards[key], gradient, total_gradient)
    return _compare(update, step_gradients, total_gradient, rounding)


def _judge_as_one_batch(
    update: int, step_gradients: list[Gradient], merged: Gradient, findings: Findings
) -> _Verdict | None:
    """The verdict on a model whose forward calls collectives, as SyncBatchNorm does: it is replayed as one batch."""
    verdict = _compare(update, step_gradients, merged, 0.0)
    if verdict is not None and verdict.residual <= _MAX_ROUNDING:
        return dataclasses.replace(verdict, rounding=verdict.residual)
    findings.add_unchecked(f"replay of update {update}: the model calls collectives in its forward")
    return None


def _compare(update: int, step_gradients: list[Gradient], total_gradient: Gradient, rounding: float) -> _Verdict | None:
    common_names = [name for name in total_gradient if all(name in step_gradient for step_gradient in step_gradients)]
    expected = {name: total_gradient[name] for name in common_names}
    if not common_names or not _norm(expected):
        return None
    worst: _Verdict | None = None
    for step_gradient in step_gradients:
        square = sum(float(expected[name] @ expected[name]) for name in common_names)
        factor = sum(float(step_gradient[name] @ expected[name]) for name in common_names) / square
        scaled = {name: factor * value for name, value in expected.items()}
        distances = {name: float(np.linalg.norm(step_gradient[name] - scaled[name])) for name in common_names}
        farthest_names = tuple(sorted(distances, key=lambda name: -distances[name])[:_MAX_NAMES])
        verdict = _Verdict(
            update,
            _distance(step_gradient, expected, expected),
            rounding,
            factor,
            _distance(step_gradient, scaled, {name: step_gradient[name] for name in common_names}),
            farthest_names,
        )
        worst = verdict if worst is None or not verdict.distance <= worst.distance else worst
    return worst


def _report_verdicts(verdicts: list[_Verdict], has_term_weights: bool, evidence: Evidence, findings: Findings) -> None:
    """Add a line for all updates that are equal, and one for the first update that is not."""
    prefix = "in one process and float64: "
    rank_count = f"of {evidence.world_size} rank{'s' if evidence.world_size > 1 else ''}"
    equal = [verdict for verdict in verdicts if (verdict.is_equal if has_term_weights else verdict.is_multiple)]
    if equal:
        distance = max(verdict.distance if has_term_weights else verdict.residual for verdict in equal)
        text = f"the gradient is equal to {distance:.0e}"
        if distance > _USUAL_ROUNDING:
            cause = "see replicas.drift" if findings.has("replicas.drift") else "float32 rounding"
            text = f"the gradient is {distance:.0e} of its norm away, like each backward from its own replay ({cause})"
        if not has_term_weights:
            text = f"the gradient is a multiple, equal to {distance:.0e}: {_UNCOUNTED}"
        findings.replayed.append(f"{_updates([verdict.update for verdict in equal])} {rank_count} {prefix}{text}")
    if has_term_weights:
        for verdict in [verdict for verdict in verdicts if not verdict.is_equal][:1]:
            _report_difference(verdict, f"update {verdict.update} {rank_count} {prefix}", evidence, findings)
    elif len(equal) < len(verdicts):
        findings.add_unchecked(f"replay: the weight of each backward: {_UNCOUNTED}")


def _report_difference(verdict: _Verdict, prefix: str, evidence: Evidence, findings: Findings) -> None:
    """Report a gradient that differs; add a finding only if no other rule explains it."""
    if verdict.is_multiple:
        text = f"the gradient is {scale_error(verdict.factor)}"
    else:
        text = f"the gradient is {verdict.distance:.2g} of its norm away, most in {', '.join(verdict.farthest_names)}"
    kinds = ("gradient.", "clip.", "replicas.")
    explaining_rules = [
        finding.rule for kind in kinds for finding in findings.worst_first() if finding.rule.startswith(kind)
    ]
    findings.replayed.append(prefix + text + (f" (see {explaining_rules[0]})" if explaining_rules else ""))
    if not explaining_rules and verdict.distance > _MAX_ROUNDING and verdict.update not in evidence.updates_after_skip:
        line = evidence.steps[verdict.update][evidence.ranks[0]].line if verdict.update in evidence.steps else ""
        fix = "find the code that changes .grad between backward and step"
        findings.add("WARN", "replay.differs", line, f"{prefix}{text}", fix)


def _report_batch_norm(evidence: Evidence, events: list[ReplayedUpdate], findings: Findings) -> None:
    """Report how much the gradient changes because batch norm uses only some of an update's samples at a time."""
    distances: dict[int, float] = {}
    for event in events:
        replayed = evidence.replayed(event.number)
        if event.batch_norm_failure and event.batch_norm_failure != "sends":
            findings.add_unchecked(f"replay: the effect of batch norm: {event.batch_norm_failure}")
        elif "merged" in replayed and "without_dropout" in replayed:
            merged, unmerged = replayed["merged"], replayed["without_dropout"]
            if _distance(replayed["merged_local_norm"], unmerged, unmerged) > _FLOAT64_TOLERANCE:
                findings.add_unchecked("replay: the effect of batch norm: something else depends on the batch, too")
            else:
                distances[event.number] = _distance(unmerged, merged, merged)
    if not distances or max(distances.values()) <= _COUPLING_TOLERANCE:
        return
    sizes, forwards = events[0].sizes, evidence.of(evidence.ranks[0], Forward)
    line = next((event.line for event in forwards if event.is_grad), "")
    smallest, largest = min(distances.values()), max(distances.values())
    change = f"{smallest:.1%}" if f"{smallest:.1%}" == f"{largest:.1%}" else f"{smallest:.1%} to {largest:.1%}"
    text = f"{_updates(list(distances))}: batch norm uses {max(sizes)} samples at a time, not the {sum(sizes)} of an "
    text += f"update, which changes the gradient by {change} of its norm" + (
        " (without dropout)" if events[0].without_dropout else ""
    )
    fix = "SyncBatchNorm.convert_sync_batchnorm(model) uses the samples of all ranks"
    if evidence.world_size == 1:
        fix = "use more samples in each backward, or GroupNorm, which normalises each sample by itself"
    findings.add("NOTE", "replay.batchnorm", line, text, fix)


def _updates(numbers: list[int]) -> str:
    return f"update {numbers[0]}" if len(numbers) == 1 else f"updates {min(numbers)} to {max(numbers)}"


def _distance(first: Gradient, second: Gradient, reference: Gradient) -> float:
    """The distance between two gradients, relative to the norm of `reference`; a missing tensor is zero."""
    names = set(first) & set(reference) | set(second) & set(reference)
    difference = {
        name: first.get(name, 0.0 * reference[name]) - second.get(name, 0.0 * reference[name]) for name in names
    }
    return _norm(difference) / max(_norm(reference), 1e-300)


def _differ_in_shape(*gradients: Gradient) -> bool:
    shapes = [(name, value.shape) for gradient in gradients for name, value in gradient.items()]
    return len(set(shapes)) > len(dict(shapes))


def _norm(gradient: Gradient) -> float:
    return float(np.sqrt(sum(float(value @ value) for value in gradient.values())))
