"""Compare the trace of a run with `single`: tolerances and the first divergence. Plain arithmetic on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from everyrank.parity.reference import MAX_REVERSED_DIFFERENCE, Reference, relative, tensor_distance
from everyrank.parity.trace import Trace

__all__ = ["LOSS_BASE", "LOSS_FACTOR", "Comparison", "compare", "largest", "tensor_tolerance"]

LOSS_BASE = {"float64": 1e-10, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
# allowed multiple of the distance between perturbed runs; larger in float64, which has only two perturbed runs
LOSS_FACTOR = {"float64": 100.0, "float32": 10.0, "bf16": 10.0, "fp16": 10.0}
_TENSOR_BASE = {"float64": 1e-13, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}  # relative to the largest element
_MOVED_BASE = 1e-7  # relative to the distance moved, float64; a mistake changes the update by much more
_TENSOR_FACTOR = 10.0
_EVALUATION_BASE = 1e-9
_METRIC_BASE = 1e-6  # `1.0 / rank` of integers is float32 in any run, and its sum depends on how the samples are split


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a run with `single`.

    `difference` and `tolerance` belong to the first divergence, or if there is none, to the loss that came closest to
    its tolerance. `location` and `update` (counted over all segments; -1 outside the updates) say where they differ.
    `category` is count, single, loss, replicas, tensor or evaluation. `cause` is set if the divergence alone shows it.
    """

    is_equal: bool
    difference: float | None
    tolerance: float | None
    loss_difference: float = 0.0
    scope: str = ""
    text: str = ""
    category: str = ""
    location: str = ""
    update: int = -1
    cause: str | None = None


@dataclass(frozen=True)
class _Divergence:
    """Where a run differs, by how much, and the tolerance."""

    category: str
    location: str
    difference: float | None
    tolerance: float | None
    update: int = -1
    cause: str | None = None


def compare(reference: Reference, run: Trace, precision: str) -> Comparison:
    """Compare `run` with `single`, with tolerances from the perturbed runs."""
    single = reference.trace
    base, factor = LOSS_BASE[precision], LOSS_FACTOR[precision]
    tolerances = [max(base, factor * floor) for floor in reference.loss_floors]
    differences = [relative(a, b, reference.loss_scale) for a, b in zip(single.losses, run.losses, strict=True)]
    divergence = (
        _count_difference(reference, run)
        or _single_differs_from_itself(reference, precision)
        or _loss_difference(reference, differences, tolerances)
        or _replica_difference(run)
        or _tensor_difference(reference, run, precision)
        or _evaluation_difference(reference, run, precision)
    )
    worst, scope = max(differences), _scope(reference, run)
    if divergence is not None:
        return Comparison(
            False,
            divergence.difference,
            divergence.tolerance,
            worst,
            scope,
            category=divergence.category,
            location=divergence.location,
            update=divergence.update,
            cause=divergence.cause,
        )
    _, difference, tolerance = max((d / t, d, t) for d, t in zip(differences, tolerances, strict=True))
    text = f"{len(differences)} losses differ by at most {worst:.1e} (tolerance {tolerance:.0e}), "
    text += _describe_tensors(reference, run, precision)
    text += f"; not compared: {', '.join(run.not_compared)}" if run.not_compared else ""
    return Comparison(True, difference, tolerance, worst, scope, text)


def _scope(reference: Reference, run: Trace) -> str:
    """Return the compared range, such as `20 updates` or `to update 5; rounding grows beyond`, and the tensors left
    out.
    """
    lengths = [len(segment) for segment in reference.segments]
    left_out = f"; not compared: {_name_list(run.not_compared)}" if run.not_compared else ""
    if not reference.is_truncated:
        return f"{sum(lengths)} update{'s' * (sum(lengths) != 1)}{left_out}"
    second_segment = f", {lengths[1]} more at the epoch's end" if len(lengths) > 1 else ""
    return f"to update {lengths[0]}{second_segment}; rounding grows beyond{left_out}"


def _name_list(names: Sequence[str]) -> str:
    """Return the first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _count_difference(reference: Reference, run: Trace) -> _Divergence | None:
    single = reference.trace
    for index, (expected_count, count) in enumerate(zip(single.counts, run.counts, strict=True)):
        difference = relative(expected_count, count)
        if difference > 1e-6:
            cause = None
            if set(single.counts) == {1.0}:  # one term for any batch size
                cause = (
                    f"the loss counted {count:g} terms over all ranks and {expected_count:g} {reference.where}: it "
                    "returns a mean over its own slice (a local mean); return (sum over terms, number of terms)"
                )
            counts = f"{count:g}, and {expected_count:g} {reference.where}"
            location = f"{_update(reference, index)}, count of loss terms ({counts})"
            return _Divergence("count", location, difference, 1e-6, index, cause)
    return None


def _single_differs_from_itself(reference: Reference, precision: str) -> _Divergence | None:
    """Return a divergence if reversing the samples already changes the first loss of `single`."""
    if precision != "float64":
        return None
    index = 0
    for segment, floor in zip(reference.segments, reference.reversed_differences, strict=True):
        if floor > MAX_REVERSED_DIFFERENCE:
            cause = (
                f"with the samples of the batch in reverse order, the loss of {reference.name} itself differs by "
                f"{floor:.1e} from equal weights: the model draws random numbers (dropout as a function?), or the loss "
                "is not a sum over samples"
            )
            return _Divergence(
                "single",
                f"{_update(reference, index)}, {reference.name} itself",
                floor,
                MAX_REVERSED_DIFFERENCE,
                index,
                cause,
            )
        index += len(segment)
    return None


def _loss_difference(reference: Reference, differences: list[float], tolerances: list[float]) -> _Divergence | None:
    for index, (difference, tolerance) in enumerate(zip(differences, tolerances, strict=True)):
        if not difference <= tolerance:  # NaN differs from everything
            return _Divergence("loss", f"{_update(reference, index)}, loss", difference, tolerance, index)
    return None


def _replica_difference(run: Trace) -> _Divergence | None:
    if run.replicas_equal:
        return None
    names = f" of {_name_list(run.unequal_replicas)}" if run.unequal_replicas else ""
    return _Divergence("replicas", f"the replicas{names}, bit by bit", None, None, len(run.losses) - 1)


def _tensor_difference(reference: Reference, run: Trace, precision: str) -> _Divergence | None:
    last = -1
    for number, final in enumerate(reference.trace.finals):
        last += len(reference.segments[number])
        for name, tensor in final.items():
            if name in run.not_compared:
                continue
            tolerance = tensor_tolerance(reference, number, name, tensor, precision)
            if tolerance is None:
                continue
            other = run.finals[number].get(name)
            difference = (
                math.inf if other is None else tensor_distance(tensor, other, reference.zero_gradient_masks.get(name))
            )
            if not difference <= tolerance:
                scale = largest(tensor)
                location = f"{_update(reference, last)}, tensor {name}"
                return _Divergence("tensor", location, difference / scale, tolerance / scale, last)
    return None


def tensor_tolerance(reference: Reference, number: int, name: str, tensor: Tensor, precision: str) -> float | None:
    """Return the largest allowed difference of an element after segment `number`; None if only rounding moves the
    tensor.
    """
    floor, moved = reference.floors[number][name], reference.trace.moved[number].get(name, 0.0)
    base = _TENSOR_BASE[precision] * largest(tensor)
    if precision == "float64":
        if floor > base and reference.is_noise(number, name):
            return None
        base = max(base, _MOVED_BASE * moved)
    return max(base, _TENSOR_FACTOR * floor)


def largest(tensor: Tensor) -> float:
    """Return the magnitude of the largest finite element, at least 1e-300."""
    if not tensor.numel():
        return 1e-300
    # aminmax avoids a copy in float64, and one of magnitudes
    magnitude = max(*map(abs, map(float, tensor.aminmax())), 1e-300)
    return magnitude if math.isfinite(magnitude) else largest(tensor[tensor.isfinite()])


def _describe_tensors(reference: Reference, run: Trace, precision: str) -> str:
    """Return the largest difference of tensors, and the number that could not be compared."""
    worst, left_out = 0.0, set(reference.zero_gradient_masks)
    for number, final in enumerate(reference.trace.finals):
        for name, tensor in final.items():
            if name in run.not_compared:
                continue
            if tensor_tolerance(reference, number, name, tensor, precision) is None:
                left_out.add(name)
            else:
                difference = tensor_distance(tensor, run.finals[number][name], reference.zero_gradient_masks.get(name))
                worst = max(worst, difference / largest(tensor))
    text = f"{len(reference.trace.finals[0])} tensors by at most {worst:.1e} of their largest element"
    if left_out:
        text += f" ({len(left_out)} of them, in part, only change by rounding, for example {min(left_out)})"
    return text


def _evaluation_difference(reference: Reference, run: Trace, precision: str) -> _Divergence | None:
    if precision != "float64":
        return None
    grown_rounding = 100 * max(reference.loss_floors)
    for name, (total, count) in reference.trace.evaluation.items():
        run_total, run_count = run.evaluation[name]
        if relative(count, run_count) > 1e-12:
            location = f"evaluation, count of {name} ({run_count:g}, and {count:g} {reference.where})"
            return _Divergence("evaluation", location, relative(count, run_count), 1e-12)
        if math.isnan(total) and math.isnan(run_total):
            continue
        base = _EVALUATION_BASE if name == "loss" else _METRIC_BASE
        tolerance = max(base, grown_rounding, 100 * reference.evaluation_floors.get(name, 0.0))
        difference = relative(total, run_total, reference.loss_scale * count if name == "loss" else 0.0)
        # for counts such as correct predictions, rounding may decide a tie differently
        is_a_tie = name != "loss" and total.is_integer() and abs(total - run_total) <= max(1.0, 1e-3 * count)
        if not (difference <= tolerance or is_a_tie):
            return _Divergence("evaluation", f"evaluation, sum of {name}", difference, tolerance)
    return None


def _update(reference: Reference, index: int) -> str:
    """Return `update 3`, and for segments after the first its batch and epoch too."""
    for number, segment in enumerate(reference.segments):
        if index < len(segment):
            update = segment[index]
            position = f" (batch {update.index} of epoch {update.epoch}, from the initial state)" if number else ""
            return f"update {update.step}{position}"
        index -= len(segment)
    raise AssertionError("no such update")
