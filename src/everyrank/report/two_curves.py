"""Compare two loss curves: do they differ by rounding, by the noise of seeds, or by a change of the training?

One run of each side can only show rounding, or a difference at a certain step. To measure the noise of seeds, give a
folder of runs with different seeds for A, for B, or for both.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everyrank.errors import UsageError
from everyrank.report.curves import Curve

__all__ = ["CurveComparison", "compare_curves", "pairs_of_curves", "uncompared_layouts"]

_ROUNDING = {
    "float64": 1e-10,
    "float32": 1e-5,
    "bf16": 1e-2,
    "fp16": 3e-3,
}  # largest relative difference that rounding causes in the first losses
_GROWTH = 10.0  # rounding differences may grow by this factor in one step; chosen, not measured
_MAX_DIFFERENCE = 0.05  # relative; above it, rounding cannot be distinguished from seeds
# largest relative error of the factor between two losses; with a larger error, every factor is near a whole number
_MAX_FACTOR_ERROR = 0.25
_PARTS = 4  # parts of the curve, each compared by a t-test
_LEVEL = 0.05


@dataclass(frozen=True)
class CurveComparison:
    """The result of a comparison.

    status       "equal", "rounding", "noise of seeds", "different" or "undecided"
    text         explanation of the status, with numbers
    next         what to do next; "" if the result is certain
    assumptions  assumptions of this result
    """

    status: str
    text: str
    next: str = ""
    assumptions: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines to print."""
        rows = [f"{self.status}: {self.text}"]
        rows += [f"next: {self.next}"] if self.next else []
        return [*rows, *(f"assumed: {text}" for text in self.assumptions)]


def pairs_of_curves(runs_a: Sequence[Curve], runs_b: Sequence[Curve]) -> list[tuple[str, list[Curve], list[Curve]]]:
    """Return (label, runs of A, runs of B) to compare. Records of several layouts are compared layout by layout.

    Raises `UsageError` if a side has several layouts and none of them is on the other side.
    """
    labels = [list(dict.fromkeys(run.label for run in runs)) for runs in (runs_a, runs_b)]
    if len(labels[0]) == len(labels[1]) == 1:
        return [(labels[0][0], list(runs_a), list(runs_b))]
    rows = [
        (label, [run for run in runs_a if run.label == label], [run for run in runs_b if run.label == label])
        for label in labels[0]
        if label in labels[1]
    ]
    if not rows:
        label_texts = [
            ", ".join(name or "no layout" for name in names[:3]) + ", ..." * (len(names) > 3) for names in labels
        ]
        raise UsageError(
            f"A and B have no layout in common: A has {label_texts[0]}; B has {label_texts[1]}; give files with one "
            "layout each"
        )
    return rows


def uncompared_layouts(runs_a: Sequence[Curve], runs_b: Sequence[Curve]) -> list[str]:
    """Return the layouts that `pairs_of_curves` leaves out because only one side has them, with that side."""
    labels_a, labels_b = (dict.fromkeys(run.label for run in runs) for runs in (runs_a, runs_b))
    if len(labels_a) == len(labels_b) == 1:
        return []
    one_sided = [("A", label) for label in labels_a if label not in labels_b]
    one_sided += [("B", label) for label in labels_b if label not in labels_a]
    return [f"{label or 'no layout'} (only in {side})" for side, label in one_sided]


def compare_curves(
    runs_a: Sequence[Curve], runs_b: Sequence[Curve], precision: str | None = None, same_seed: bool = False
) -> CurveComparison:
    """Compare the runs of two experiments.

    runs_a, runs_b  the runs of each, which differ only in their seeds
    precision       of the runs; None: the coarsest that the Records name, else float32
    same_seed       the single runs of both sides have the same seed and read the same samples

    Raises `UsageError` for fewer than 2 common steps, a run twice, an unknown precision, or losses that are NaN or
    infinite on both sides.
    """
    runs = [*runs_a, *runs_b]
    for side in (runs_a, runs_b):
        for index, run in enumerate(side):
            copies = [other.name for other in side[:index] if other.losses == run.losses]
            if copies:
                raise UsageError(f"{copies[0]} and {run.name} are the same run; give runs with different seeds")
    steps, note = _common_steps(runs_a, runs_b)
    precisions = [run.precision for run in runs if run.precision]
    coarsest = max(precisions, key=lambda name: _ROUNDING.get(name, math.inf), default="float32")
    precision_name = precision or coarsest
    if precision_name not in _ROUNDING:
        raise UsageError(f"--precision {precision_name}: give one of {', '.join(_ROUNDING)}")
    resolution = max(run.resolution for run in runs)
    tolerances = {step: max(_ROUNDING[precision_name] * abs(runs_a[0].losses[step]), 2 * resolution) for step in steps}
    result = _not_finite_on_one_side(runs_a, runs_b, steps)
    if result is None and len(runs_a) == len(runs_b) == 1:
        result = _compare_single_runs(runs_a[0], runs_b[0], steps, tolerances, precision_name, same_seed)
    elif result is None:
        result = _compare_seeds(runs_a, runs_b, steps)
    assumptions = list(result.assumptions)
    if resolution and result.status != "equal":
        assumptions.append(f"the losses are printed to {resolution * 2:.0e}; smaller differences are invisible")
    return CurveComparison(result.status, result.text, result.next, (*([note] if note else []), *assumptions))


def _common_steps(runs_a: Sequence[Curve], runs_b: Sequence[Curve]) -> tuple[list[int], str]:
    runs = [*runs_a, *runs_b]
    common = sorted(set[int](runs[0].losses).intersection(*(run.losses for run in runs[1:])))
    if len(common) < 2:
        shortest = [min(side, key=lambda run: len(run.losses)) for side in (runs_a, runs_b)]
        run_texts = [f"{run.name} has {len(run.losses)} ({_steps_text(run)})" for run in shortest]
        raise UsageError(
            f"{len(common)} step{'s' * (len(common) != 1)} in common, and 2 are needed: {'; '.join(run_texts)}; "
            "log both at the same steps"
        )
    longest = max(len(run.losses) for run in runs)
    has_gaps = any(len(run.losses) != len(common) for run in runs)
    return common, f"only the {len(common)} steps that all runs have are compared, of {longest}" if has_gaps else ""


def _steps_text(curve: Curve) -> str:
    steps = list(curve.losses)
    shown = ", ".join(map(str, steps[:3]))
    return shown if len(steps) <= 3 else f"{shown}, ... {steps[-1]}"


def _not_finite_on_one_side(
    runs_a: Sequence[Curve], runs_b: Sequence[Curve], steps: Sequence[int]
) -> CurveComparison | None:
    """Return a difference if only one side has losses that are NaN or infinite. Raises `UsageError` if both have."""
    first_steps: dict[str, int | None] = {}
    for name, runs in (("A", runs_a), ("B", runs_b)):
        not_finite = [step for step in steps if any(not math.isfinite(run.losses[step]) for run in runs)]
        first_steps[name] = not_finite[0] if not_finite else None
    if first_steps["A"] == first_steps["B"] is None:
        return None
    if first_steps["A"] is not None and first_steps["B"] is not None:
        raise UsageError(
            f"both have losses that are NaN or infinite (A from step {first_steps['A']}, B from {first_steps['B']})"
        )
    name = "A" if first_steps["A"] is not None else "B"
    return CurveComparison(
        "different", f"only {name} has losses that are NaN or infinite, first at step {first_steps[name]}"
    )


# --- one run of each


def _compare_single_runs(
    run_a: Curve, run_b: Curve, steps: Sequence[int], tolerances: Mapping[int, float], precision: str, same_seed: bool
) -> CurveComparison:
    differences = {step: run_b.losses[step] - run_a.losses[step] for step in steps}
    if not any(differences.values()):
        return CurveComparison("equal", f"all {len(steps)} losses are the same, digit by digit")
    assumptions = (
        f"rounding in {precision} (--precision) changes the first losses by at most {_ROUNDING[precision]:.0e} of "
        "their value",
        f"rounding differences grow by at most a factor of {_GROWTH:g} in a step",
    )
    first_step = steps[0]
    if abs(differences[first_step]) > tolerances[first_step]:
        return _different_start(run_a, run_b, steps, tolerances, same_seed)
    largest = max(steps, key=lambda step: abs(differences[step]) / (abs(run_a.losses[step]) or 1.0))
    largest_difference = _relative_difference(differences[largest], run_a.losses[largest])
    jump_step = _first_jump(steps, differences, tolerances)
    if jump_step is not None:
        text = (
            f"the difference jumps at step {jump_step}, whose losses are {run_a.losses[jump_step]:.6g} and "
            f"{run_b.losses[jump_step]:.6g}: rounding does not grow so fast"
        )
        return CurveComparison("different", text, assumptions=(*assumptions, "both read the same samples"))
    beyond = [step for step in steps if abs(differences[step]) > tolerances[step]]
    if not beyond:
        text = f"{len(steps)} losses differ by at most {largest_difference:.1e} of their value (step {largest})"
        return CurveComparison("rounding", text, assumptions=assumptions)
    start = f"the first losses agree, and the difference grows to {largest_difference:.1e} of the loss (step {largest})"
    advice = "give a folder with 3 or more runs of different seeds for A, for B, or for both"
    if largest_difference > _MAX_DIFFERENCE or _spacing(steps) > 1:
        reason = (
            "after so large a difference, rounding and seeds look the same"
            if largest_difference > _MAX_DIFFERENCE
            else "the growth between logged steps is unknown"
        )
        return CurveComparison("undecided", f"{start}: {reason}", advice, assumptions)
    signs = [differences[step] > 0 for step in beyond]
    one_sided = max(signs.count(True), signs.count(False))
    if len(beyond) >= 8 and one_sided >= 0.95 * len(beyond):
        sign = "above" if signs.count(True) == one_sided else "below"
        text = f"{start}, with B {sign} A in {one_sided} of the {len(beyond)} steps that differ: a drift"
        return CurveComparison("undecided", text, advice, assumptions)
    return CurveComparison("rounding", f"{start} gradually, as rounding does", assumptions=assumptions)


def _different_start(
    run_a: Curve, run_b: Curve, steps: Sequence[int], tolerances: Mapping[int, float], same_seed: bool
) -> CurveComparison:
    """Return the result if the first losses differ, by a different seed or a different loss."""
    first = steps[0]
    loss_a, loss_b = run_a.losses[first], run_b.losses[first]
    difference = _relative_difference(loss_b - loss_a, loss_a)
    text = (
        f"the first losses (step {first}) are {loss_a:.6g} and {loss_b:.6g}, a relative difference of {difference:.1e}"
    )
    scale = _scale_of_loss(run_a, run_b, steps, tolerances)
    if scale is not None:
        return CurveComparison(
            "different", f"{text}; B is {scale:.6g} times A: the loss is multiplied by a constant", assumptions=()
        )
    if same_seed:
        return CurveComparison(
            "different", text, assumptions=("both have the same seed and read the same samples (--same-seed)",)
        )
    return CurveComparison(
        "undecided",
        f"{text}; a different seed does this, and so does a different loss, model or order of samples",
        "add --same-seed if the seeds are the same; else give a folder with 3 or more runs for A, for B, or for both",
    )


def _scale_of_loss(run_a: Curve, run_b: Curve, steps: Sequence[int], tolerances: Mapping[int, float]) -> float | None:
    """Return the factor between the first losses that are not zero if it is N or 1/N, with N a whole number above 1."""
    step = next((step for step in steps if run_a.losses[step]), None)
    factor = 0.0 if step is None else run_b.losses[step] / run_a.losses[step]
    if step is None or not (0 < factor < math.inf and 1 / factor < math.inf):
        return None
    scale = round(factor) if factor >= 1 else 1 / round(1 / factor)
    tolerance = 2 * tolerances[step] / min(abs(run_a.losses[step]), abs(run_b.losses[step]))
    is_precise = tolerance * max(scale, 1 / scale) < _MAX_FACTOR_ERROR
    return scale if is_precise and scale != 1 and abs(factor / scale - 1) < tolerance else None


def _relative_difference(difference: float, loss: float) -> float:
    return abs(difference) / abs(loss) if loss else abs(difference)


def _spacing(steps: Sequence[int]) -> int:
    return max(after - step for step, after in itertools.pairwise(steps))


def _first_jump(steps: Sequence[int], differences: Mapping[int, float], tolerances: Mapping[int, float]) -> int | None:
    """Return the first step whose difference is much larger than those before it."""
    largest, previous = 0.0, steps[0]
    for step in steps:
        size = abs(differences[step])
        exponent = min(step - previous, 12)
        if size > max(largest, tolerances[step]) * _GROWTH**exponent:
            return step
        largest, previous = max(largest, size), step
    return None


# --- several seeds


def _compare_seeds(runs_a: Sequence[Curve], runs_b: Sequence[Curve], steps: Sequence[int]) -> CurveComparison:
    freedom = len(runs_a) + len(runs_b) - 2
    counts = f"A has {len(runs_a)} run{'s' * (len(runs_a) != 1)}, B {len(runs_b)}"
    if freedom < 2:
        return CurveComparison(
            "undecided",
            f"{counts}: too few to measure the noise of seeds",
            "give 4 runs or more in all, for example 3 seeds of A and 1 of B",
        )
    assumptions = [
        "the runs of one side differ only in their seeds, and are independent of each other",
        "the mean losses of runs are normally distributed, and spread as far in A as in B",
    ]
    segments = [segment for segment in _parts(steps) if segment]
    critical = _t_quantile(1 - _LEVEL / len(segments) / 2, freedom)
    rows: list[tuple[list[int], float, float, float]] = []
    for segment in segments:
        sides = [[statistics.fmean(run.losses[step] for step in segment) for run in runs] for runs in (runs_a, runs_b)]
        means = [statistics.fmean(side) for side in sides]
        squares = sum(
            (value - mean) * (value - mean) for side, mean in zip(sides, means, strict=True) for value in side
        )
        width = critical * math.sqrt(squares / freedom * (1 / len(runs_a) + 1 / len(runs_b)))
        rows.append((segment, means[0], means[1] - means[0], width))
    differing = [row for row in rows if abs(row[2]) > row[3]]
    segment, mean, difference, width = (differing or rows)[-1]
    scale = 100 / (abs(mean) or 1.0)
    low, high = (difference - width) * scale, (difference + width) * scale
    steps_text = f"in steps {segment[0]} to {segment[-1]}"
    difference_text = f"{steps_text} B's mean loss differs from A's by {low:+.2g}% to {high:+.2g}%"
    confidence = f"{100 * (1 - _LEVEL):g}% intervals over {len(segments)} parts of the curve"
    if differing:
        return CurveComparison(
            "different",
            f"{counts}; {difference_text}, more than seeds explain ({confidence})",
            assumptions=tuple(assumptions),
        )
    return CurveComparison(
        "noise of seeds",
        f"{counts}; {difference_text}: no more than seeds explain ({confidence}). A difference below "
        f"{width * scale:.2g}% would not be seen",
        assumptions=tuple(assumptions),
    )


def _parts(steps: Sequence[int]) -> list[list[int]]:
    size = len(steps) / min(_PARTS, len(steps))
    return [list(steps[round(index * size) : round((index + 1) * size)]) for index in range(min(_PARTS, len(steps)))]


def _t_probability(value: float, freedom: int) -> float:
    """Return P(T <= value) of Student's t, by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    start = 3 if freedom % 2 else 2
    count = (freedom - 1) // 2 if freedom % 2 else freedom // 2
    for index in range(count):
        total += term
        factor = start + 2 * index
        term *= cosine**2 * (factor - 1) / factor
    within = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return 0.5 + within / 2


def _t_quantile(probability: float, freedom: int) -> float:
    """Return the value that T exceeds with probability 1 - `probability`, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < probability else (low, middle)
    return high
