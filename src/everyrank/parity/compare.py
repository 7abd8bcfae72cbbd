"""The rules: hold the trace of a run against those of `single`. Pure arithmetic, no ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everyrank.errors import NotFiniteError
from everyrank.parity.trace import Trace

__all__ = ["Finding", "compare", "relative", "tensor_difference", "tensor_tolerance"]

_LOSS_BASE = {"float64": 1e-10, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
_TENSOR_BASE = {"float64": 1e-12, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
_FLOOR_FACTOR = 10.0


@dataclass(frozen=True)
class Finding:
    """How a run compares with `single`.

    `what` and `update` say where the first difference beyond tolerance was seen (update -1: outside the updates), and
    `cause` is set where that place alone gives it away.
    """

    is_equal: bool
    loss_difference: float
    loss_tolerance: float
    text: str = ""
    what: str = ""
    update: int = -1
    cause: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where something differs."""

    what: str
    update: int = -1
    cause: str | None = None


def compare(single: Trace, perturbed: Sequence[Trace], run: Trace, precision: str) -> Finding:
    """Hold `run` against `single`, with the perturbed runs of `single` as the band of what rounding does.

    Raises `NotFiniteError` where `single` or a perturbed run of it has no number to compare with.
    """
    for trace in (single, *perturbed):
        for index, loss in enumerate(trace.losses):
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"update {index}: the loss of single in {precision} is {loss}; nothing to compare with"
                )
    spreads = [max(relative(a, other.losses[i]) for other in perturbed) for i, a in enumerate(single.losses)]
    floors = list(itertools.accumulate(spreads, max))
    base = _LOSS_BASE[precision]
    tolerances = [base if precision == "float64" else max(base, _FLOOR_FACTOR * floor) for floor in floors]
    differences = [relative(a, b) for a, b in zip(single.losses, run.losses, strict=True)]
    worst = max(differences), max(tolerances)
    place = (
        _first_count(single, run)
        or _unsteady(floors[-1], precision)
        or _first_loss(differences, tolerances)
        or _replicas(run)
        or _first_tensor(single, perturbed, run, precision)
        or _evaluation(single, perturbed, run, precision)
    )
    if place is not None:
        return Finding(False, *worst, what=place.what, update=place.update, cause=place.cause)
    tensors = max((tensor_difference(tensor, run.final[name]) for name, tensor in single.final.items()), default=0.0)
    text = (
        f"{len(differences)} losses differ by at most {worst[0]:.1e} (tolerance {worst[1]:.1e}), "
        f"{len(single.final)} tensors by at most {tensors:.1e} (within ten noise floors)"
    )
    return Finding(True, *worst, text=text)


def _first_count(single: Trace, run: Trace) -> _Place | None:
    for index, (here, there) in enumerate(zip(single.counts, run.counts, strict=True)):
        if relative(here, there) > 1e-6:
            cause = f"the loss counted {there:g} terms over all ranks and {here:g} in one process: "
            if set(single.counts) == {1.0}:  # one term, whatever the batch
                cause += "it returns a mean over its own slice (a local mean); return (sum over terms, number of terms)"
            else:
                cause += "ranks do not read the samples they should, or the count depends on how a batch is cut"
            return _Place(f"update {index}, count of loss terms", index, cause)
    return None


def _unsteady(floor: float, precision: str) -> _Place | None:
    if precision != "float64" or floor <= 1e-8:
        return None
    cause = (
        f"with the samples of each batch in reverse, single's own loss differs by {floor:.1e}: the model draws random "
        "numbers (dropout as a function?), or the loss is no sum over samples"
    )
    return _Place("single itself", cause=cause)


def _first_loss(differences: Sequence[float], tolerances: Sequence[float]) -> _Place | None:
    for index, (difference, tolerance) in enumerate(zip(differences, tolerances, strict=True)):
        if not difference <= tolerance:  # NaN differs from everything
            return _Place(f"update {index}, loss", index)
    return None


def _replicas(run: Trace) -> _Place | None:
    return None if run.replicas_equal else _Place("the replicas", len(run.losses) - 1)


def _first_tensor(single: Trace, perturbed: Sequence[Trace], run: Trace, precision: str) -> _Place | None:
    for name, tensor in single.final.items():
        tolerance = tensor_tolerance(tensor, [other.final[name] for other in perturbed], precision)
        if not tensor_difference(tensor, run.final.get(name)) <= tolerance:
            last = len(run.losses) - 1
            return _Place(f"update {last}, tensor {name}", last)
    return None


def _evaluation(single: Trace, perturbed: Sequence[Trace], run: Trace, precision: str) -> _Place | None:
    for name, (total, count) in single.evaluation.items():
        run_total, run_count = run.evaluation[name]
        if relative(count, run_count) > 1e-12:
            cause = f"{name} counted {run_count:g} terms over all ranks and {count:g} in one process"
            return _Place(f"evaluation, count of {name}", cause=cause)
        spread = max(relative(total, other.evaluation[name][0]) for other in perturbed)
        if precision == "float64" and relative(total, run_total) > max(1e-9, _FLOOR_FACTOR * spread):
            return _Place(f"evaluation, sum of {name}", cause="ranks do not evaluate the samples they should")
    return None


def relative(reference: float, value: float) -> float:
    """The distance of `value` from `reference`, relative to that; inf where one of them is NaN."""
    if reference == value:
        return 0.0
    difference = abs(value - reference) / max(abs(reference), 1e-300)
    return difference if difference == difference else float("inf")


def tensor_difference(reference: Tensor, value: Tensor | None) -> float:
    """The largest difference, relative to the largest element of the reference; inf for another shape or NaN."""
    if value is None or value.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0 or torch.equal(reference, value):
        return 0.0
    wide, other = reference.double(), value.double()
    difference = float((wide - other).abs().max() / wide.abs().max().clamp(min=1e-300))
    return difference if difference == difference else float("inf")


def tensor_tolerance(reference: Tensor, perturbed: Sequence[Tensor], precision: str) -> float:
    """Ten times the noise floor of a tensor: how far perturbed runs of `single` are from it."""
    floor = max(tensor_difference(reference, other) for other in perturbed)
    return max(_TENSOR_BASE[precision], _FLOOR_FACTOR * floor)
