"""The gradient that stepped, beside that of all samples of the update in one process and in float64.

What each backward gave is held against its replay first: where these differ, the model has not been run as it was
(random numbers of its own, a state outside of its buffers), and nothing is said of the gradient.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import Forward, ProcessStart, ReplayedUpdate, Unchecked
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_replay"]

_ROUNDING, _FAITHFUL = 1e-4, 1e-2  # relative; of float32 after a few layers, and more than its worst
_COUPLED, _SAME = 1e-6, 1e-8  # of gradients that are both float64
_SHOWN = 3  # parameters
_UNCOUNTED = "not one loss was seen whose terms can be counted, so its scale is not judged"

Gradient = dict[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """Of one update.

    distance  of the gradient that stepped from the replay, by the latter's norm; that of the worst rank
    rounding  how much of it rounding can be: the distance of each backward from its replay, added up
    factor    by which the replay would have to be multiplied
    residual  the distance that stays then
    far       the parameters that are furthest off
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
    """Each update that was replayed; says why where none was."""
    if not any(event.replay for event in evidence.all_of(ProcessStart)):
        return
    if evidence.is_split:
        findings.not_checked("replay: layers are split over ranks (tensor or pipeline parallelism)")
        return
    events = evidence.all_of(ReplayedUpdate)
    if not events and not any("replay" in event.message for event in evidence.all_of(Unchecked)):
        findings.not_checked("replay: rank 0 ended before it could run its updates once more")
    judged: list[tuple[ReplayedUpdate, _Verdict]] = []
    for event in events:
        verdict = _judge(evidence, event, findings)
        if verdict is None:
            break  # said; of the later ones it would be the same
        judged.append((event, verdict))
    for is_weighted in (True, False):
        _say(
            [verdict for event, verdict in judged if event.is_weighted == is_weighted],
            is_weighted,
            evidence,
            findings,
        )
    _say_coupling(evidence, [event for event, _ in judged], findings)


def _judge(evidence: Evidence, event: ReplayedUpdate, findings: Findings) -> _Verdict | None:
    """None where the replay is not what has run; then that is said."""
    update, replayed = event.number, evidence.replayed(event.number)
    own = {rank: evidence.samples(rank, update) for rank in evidence.ranks}
    live = {
        f"{rank}.{micro}": piece for rank, samples in own.items() if samples for micro, piece in samples.pieces.items()
    }
    if set(live) != set(event.weights) or None in own.values():
        findings.not_checked(f"replay of update {update}: other backwards were kept than those that step")
        return None
    steps = [{**samples.steps, **samples.clipped} for samples in own.values() if samples]
    if _differ_in_shape(*steps, *live.values(), *replayed.values()):
        findings.not_checked(f"replay of update {update}: several models have parameters of the same names")
        return None
    if event.coupling == "sends":
        return _of_one_batch(update, steps, replayed["union"], findings)
    rounding, whole = 0.0, replayed["whole"]
    if not all(np.isfinite(_norm(gradient)) and _norm(gradient) for gradient in (*steps, *live.values(), whole)):
        findings.not_checked(f"replay of update {update}: a gradient is zero or not finite")
        return None
    for place, weight in event.weights.items():
        piece = replayed[f"piece.{place}"]
        away = _distance(live[place], piece, live[place])
        if not away <= _FAITHFUL:
            rank, _, micro = place.partition(".")
            findings.not_checked(
                f"replay of update {update}: backward {micro} of rank {rank}, run once more in one process, gives "
                f"another gradient ({away:.1e} away): other weights there, or random numbers or state of its own"
            )
            return None
        rounding += abs(weight) * _distance(live[place], piece, whole)
    return _compare(update, steps, whole, rounding)


def _of_one_batch(update: int, steps: list[Gradient], union: Gradient, findings: Findings) -> _Verdict | None:
    """A model that sends in its forward, as batch norm over all ranks does: it can be run as one batch alone."""
    verdict = _compare(update, steps, union, 0.0)
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
        found = _Verdict(
            update,
            _distance(step, expected, expected),
            rounding,
            factor,
            _distance(step, scaled, {name: step[name] for name in names}),
            far,
        )
        worst = found if worst is None or not found.distance <= worst.distance else worst
    return worst


def _say(verdicts: list[_Verdict], is_weighted: bool, evidence: Evidence, findings: Findings) -> None:
    """One line for all updates that are equal; one for the first that is not."""
    place = "in one process and float64: "
    ranks = f"of {evidence.world_size} rank{'s' if evidence.world_size > 1 else ''}"
    equal = [verdict for verdict in verdicts if (verdict.is_equal if is_weighted else verdict.is_multiple)]
    if equal:
        distance = max(verdict.distance if is_weighted else verdict.residual for verdict in equal)
        text = f"the gradient is equal to {distance:.0e}"
        if distance > _ROUNDING:
            cause = "see replicas.drift" if findings.has("replicas.drift") else "float32 rounding"
            text = f"the gradient is {distance:.0e} of its norm away, as each backward is from its own replay ({cause})"
        if not is_weighted:
            text = f"the gradient is a multiple, equal to {distance:.0e}: {_UNCOUNTED}"
        findings.replayed.append(f"{_updates([verdict.update for verdict in equal])} {ranks} {place}{text}")
    if is_weighted:
        for verdict in [one for one in verdicts if not one.is_equal][:1]:
            _say_difference(verdict, f"update {verdict.update} {ranks} {place}", evidence, findings)
    elif len(equal) < len(verdicts):
        findings.not_checked(f"replay: what each backward is to weigh: {_UNCOUNTED}")


def _say_difference(verdict: _Verdict, begin: str, evidence: Evidence, findings: Findings) -> None:
    """What the rules on gradients have named is not said twice."""
    if verdict.is_multiple:
        text = f"the gradient is {verdict.factor:.6g} times that of the mean over all terms"
    else:
        text = f"the gradient is {verdict.distance:.2g} of its norm away, most in {', '.join(verdict.far)}"
    kinds = ("gradient.", "clip.", "replicas.")
    named = [known.rule for kind in kinds for known in findings.worst_first() if known.rule.startswith(kind)]
    findings.replayed.append(begin + text + (f" (see {named[0]})" if named else ""))
    if not named and verdict.distance > _FAITHFUL and verdict.update not in evidence.after_jumps:
        line = evidence.steps[verdict.update][evidence.ranks[0]].line if verdict.update in evidence.steps else ""
        fix = "look at what changes .grad between backward and step"
        findings.add("WARN", "replay.differs", line, f"{begin}{text}", fix)


def _say_coupling(evidence: Evidence, events: list[ReplayedUpdate], findings: Findings) -> None:
    """How far batch norm moves the gradient from that of the whole update: a choice, with its size."""
    found: dict[int, float] = {}
    for event in events:
        replayed = evidence.replayed(event.number)
        if event.coupling and event.coupling != "sends":
            findings.not_checked(f"replay: how far batch norm couples samples: {event.coupling}")
        elif "union" in replayed and "alone" in replayed:
            union, alone = replayed["union"], replayed["alone"]
            if _distance(replayed["apart"], alone, alone) > _SAME:
                findings.not_checked(
                    "replay: how far batch norm couples samples: something else depends on the batch, too"
                )
            else:
                found[event.number] = _distance(alone, union, union)
    if not found or max(found.values()) <= _COUPLED:
        return
    sizes, forwards = events[0].sizes, evidence.of(evidence.ranks[0], Forward)
    line = next((event.line for event in forwards if event.is_grad), "")
    least, most = min(found.values()), max(found.values())
    moved = f"{least:.1%}" if f"{least:.1%}" == f"{most:.1%}" else f"{least:.1%} to {most:.1%}"
    text = (
        f"{_updates(list(found))}: batch norm over {max(sizes)} samples at a time, not the {sum(sizes)} of an update, "
    )
    text += f"moves the gradient by {moved} of its norm" + (" (without dropout)" if events[0].without_dropout else "")
    fix = "SyncBatchNorm.convert_sync_batchnorm(model) normalises over those of all ranks"
    if evidence.world_size == 1:
        fix = "more samples in each backward, or GroupNorm, which looks at one sample alone"
    findings.add("NOTE", "replay.batchnorm", line, text, fix)


def _updates(numbers: list[int]) -> str:
    return f"update {numbers[0]}" if len(numbers) == 1 else f"updates {min(numbers)} to {max(numbers)}"


def _distance(one: Gradient, other: Gradient, whole: Gradient) -> float:
    """Between two gradients, by the norm of `whole`; a tensor that one lacks is zero there."""
    names = set(one) & set(whole) | set(other) & set(whole)
    difference = {name: one.get(name, 0.0 * whole[name]) - other.get(name, 0.0 * whole[name]) for name in names}
    return _norm(difference) / max(_norm(whole), 1e-300)


def _differ_in_shape(*gradients: Gradient) -> bool:
    shapes = [(name, value.shape) for gradient in gradients for name, value in gradient.items()]
    return len(set(shapes)) > len(dict(shapes))


def _norm(gradient: Gradient) -> float:
    return float(np.sqrt(sum(float(value @ value) for value in gradient.values())))
