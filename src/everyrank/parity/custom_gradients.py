"""Compare the gradients under a custom parallelize function with one device, before whole trainings are compared.

Gradient clipping, and optimizers that normalise the gradient, hide a gradient of the wrong scale. So the first check
uses an update that equals the gradient (SGD of learning rate 1, no clipping). If this agrees and the training does not,
the cause is the clipping or the optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from everyrank.layout import CustomParallelize, Layout, find_custom_parallelize
from everyrank.loop import run_updates, wrap_user_errors
from everyrank.parallel.custom import clean_name, replicated_axes, sum_squares_of_parts
from everyrank.parallel.init_model import shared_parameters
from everyrank.parallel.mesh import local_tensors
from everyrank.parity.case import ParityCase, with_gradient_update
from everyrank.parity.initial_state import name_list
from everyrank.parity.rank_comparison import axes_of_ratio, axis_sets, ratio_text
from everyrank.strategies import Prepared, prepare
from everyrank.workload import changed
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["OPTIMIZER_DIFFERS", "cause_after_gradients", "cause_in_gradients", "gradient_case"]

_ROUNDING = 1e-6
_Tensors = dict[str, Tensor]
OPTIMIZER_DIFFERS = (
    "the gradients equal those of one device, but the updates do not: the optimizer computes a norm or another value "
    "of a whole tensor from the part of one rank, or it does not have all parameters"
)
"""The cause if the gradients were compared and are equal."""


def gradient_case(case: ParityCase) -> ParityCase:
    """Return the case whose update is the gradient without clipping; cached in `case`."""
    if case.gradient_case is None:
        workload = changed(with_gradient_update(case.workload), clip_norm=None, ema_decay=None)
        case.gradient_case = dataclasses.replace(
            case,
            workload=workload,
            eval_ends=None,
            compares_gradients=True,
            is_quick=True,
            notes=[],
            segments={},
            from_disk=set(),
            names={},
            references={},
        )
    return case.gradient_case


def cause_in_gradients(
    before: Sequence[_Tensors],
    after: Sequence[_Tensors],
    code: CustomParallelize,
    model: nn.Module,
    rank_differences: str = "",
) -> str:
    """Explain why gradients differ; `before` and `after` are the states of (one device, the layout) around one update.

    `model` is the argument of the user's function; `rank_differences` is the result of `gradients_by_rank`.
    """
    untied_names = _untied(after[1], model)
    if untied_names:
        return (
            f"{' and '.join(untied_names)} are one tensor in the model as built, but two after {code.path}; tie them "
            "again, or leave them out of the plan"
        )
    ratios = _ratios(before, after)
    wrong = {name: ratio for name, ratio in ratios.items() if ratio is None or abs(ratio - 1.0) > _ROUNDING}
    if not wrong:
        return "the gradients of one update equal those of one device, but those of several updates do not"
    without_gradient = [name for name, ratio in wrong.items() if ratio == 0.0]
    if len(without_gradient) == len(wrong):
        return (
            f"{name_list(without_gradient)} gets no gradient: requires_grad is False, or no rank's loss depends on it"
        )
    how_many = "all" if len(wrong) == len(ratios) else f"{len(wrong)} of {len(ratios)}"
    first = next(iter(wrong.values()))
    is_one_multiple = first is not None and all(
        ratio is not None and abs(ratio - first) <= _ROUNDING * abs(first) for ratio in wrong.values()
    )
    if first is None or not is_one_multiple:
        reason = rank_differences or (
            "the parts of the ranks are not summed, or they are computed from different values than on one device"
        )
        tensors = f"{how_many} tensors ({next(iter(wrong))} first)"
        return f"the gradients of {tensors} differ from those of one device, and not by one factor: {reason}"
    subject = f"the gradient{'' if how_many == 'all' else f's of {how_many} tensors'}"
    verb = "is" if how_many == "all" else "are"
    return f"{subject} {verb} {first:.4g} times that of one device{_axis_cause(code, first)}"


def _ratios(before: Sequence[_Tensors], after: Sequence[_Tensors]) -> dict[str, float | None]:
    """For each tensor, return its gradient as a multiple of that of one device; None if it is no multiple.

    If the gradient of one device is zero, it is 1.0 if the other is zero, too, else None.
    """
    result: dict[str, float | None] = {}
    for name, tensor in before[0].items():
        if not tensor.is_floating_point() or "running_" in name or name not in before[1]:
            continue
        expected_gradient = (after[0][name] - tensor).double()
        gradient = (after[1][name] - before[1][name]).double()
        square = float((expected_gradient * expected_gradient).sum())
        if not square:
            result[name] = None if bool(gradient.any()) else 1.0
            continue
        ratio = float((expected_gradient * gradient).sum()) / square
        is_multiple = float((gradient - ratio * expected_gradient).norm()) <= _ROUNDING * max(
            1.0, abs(ratio)
        ) * math.sqrt(square)
        result[name] = ratio if is_multiple else None
    return result


def _untied(state: _Tensors, model: nn.Module) -> list[str]:
    """Return the names of a shared tensor of the model whose copies are no longer equal, or []."""
    for names_of_tensor in shared_parameters(model):
        names = [f"{module}.{name}".lstrip(".") for module, name in names_of_tensor]
        if all(name in state for name in names) and not all(torch.equal(state[names[0]], state[n]) for n in names):
            return names
    return []


def _axis_cause(code: CustomParallelize, ratio: float) -> str:
    """Name the axes whose size, or its inverse, equals the ratio of the gradients, and describe how to fix it."""
    axes = axes_of_ratio(code, ratio, 1e-3)
    if axes is None:
        return ""
    size = math.prod(code.axes[axis] for axis in axes)
    others = [axis for axis, ranks in code.axes.items() if ranks == size and axis not in axes]
    axes_text = " x ".join(axes) + "".join(f" (or {axis})" for axis in others)
    declared = {code.contract.gradient_over(axis) for axis in axes if code.contract.reads(axis) != "same"}
    if not declared:
        reason = "counted once on each rank" if ratio > 1 else "the part of only one rank"
        return f", {ratio_text(ratio)} along {axes_text}, which read the same samples: it is {reason}"
    axis = axes[0]
    if ratio > 1 and declared == {"mean"}:
        return (
            f", {ratio_text(ratio)} along {axes_text}: it is summed over them, and the contract declares a mean; "
            f"divide the loss by mesh[{axis!r}].size() (scale_loss), or declare gradients={{{axis!r}: 'sum'}}"
        )
    if ratio > 1:
        claim = "it is multiplied by their number once too often"
    elif declared == {"sum"}:
        claim = "the contract declares a sum; declare mean"
    else:
        claim = "it is divided by them once too often"
    return f": there are {size} ranks along {axes_text}, and {claim}"


def cause_after_gradients(case: ParityCase, layout: Layout, world: World, not_compared: Sequence[str] = ()) -> str:
    """Explain why the training differs although the gradients equal those of one device. A collective.

    `not_compared` are the tensors whose gradients could not be compared.
    """
    code = find_custom_parallelize(layout, world.size)
    cause = _added_parameters(case, layout, world, code)
    if not cause and code.contract.clip_grad_norm is not None and case.workload.clip_norm is not None:
        cause = _cause_in_clipping(case, layout, world, code)
    if not cause and not_compared:
        return (
            f"the gradients that were compared equal those of one device; those of {name_list(not_compared)} were not "
            "compared, because without a DTensor it is unknown which part a rank has. Give the contract a "
            "gather(model, mesh) that returns whole tensors"
        )
    return cause or OPTIMIZER_DIFFERS


def _added_parameters(case: ParityCase, layout: Layout, world: World, code: CustomParallelize) -> str:
    """Name trained parameters that `parallelize` adds to those of the model as built; "" for none. A collective."""
    with wrap_user_errors():
        prepared = prepare(case.workload, dataclasses.replace(layout, precision="float64"), world)
    built = {name for name, _ in case.build_for_inspection().named_parameters(remove_duplicate=False)}
    trained = {
        clean_name(name): parameter.requires_grad
        for name, parameter in prepared.model.named_parameters(remove_duplicate=False)
    }
    added = [name for name, is_trained in trained.items() if is_trained and name not in built]
    if not added or not built <= trained.keys():  # the function gives parameters other names
        return ""
    return (
        f"the gradients of the model as built equal those of one device, but {code.path} adds {name_list(added)}, "
        "which is trained, too: add it in model(), or freeze it"
    )


def _cause_in_clipping(case: ParityCase, layout: Layout, world: World, code: CustomParallelize) -> str:
    """Compute from the clipped gradient which norm `clip_grad_norm` used, and explain it if it is wrong."""
    workload = changed(with_gradient_update(case.workload), clip_norm=None, ema_decay=None)
    unclipped = _after_one_update(dataclasses.replace(case, workload=workload), layout, world)
    norm = float(sum_squares_of_parts(unclipped.trainable.parameters).sqrt())
    local_norm = _local_norm(unclipped)
    limit = 0.1 * norm  # small enough that it has to clip
    clipped = _after_one_update(dataclasses.replace(case, workload=changed(workload, clip_norm=limit)), layout, world)
    clipped_norm = _local_norm(clipped)
    used_norm = limit * local_norm / clipped_norm if clipped_norm else math.inf
    rows = all_gather(torch.tensor([local_norm, used_norm], dtype=torch.float64), world)
    norms, used_norms = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
    wrong_norm = max(used_norms, key=lambda value: abs(value - norm))
    if abs(wrong_norm - norm) <= 1e-4 * norm:
        return ""
    text = f"clip_grad_norm uses {wrong_norm:.6g} as the norm of the gradients, but it is {norm:.6g}"
    axes = _axes_of_norm(code, norms, used_norms, norm)
    if axes is None:
        return text
    return f"{text}: {_clipping_cause(unclipped, code, axes)}"


def _after_one_update(case: ParityCase, layout: Layout, world: World) -> Prepared:
    """Return the prepared layout after the first update."""
    with wrap_user_errors():
        prepared = prepare(case.workload, dataclasses.replace(layout, precision="float64"), world)
    next(iter(run_updates(prepared, case.train_data, case.planned("float64")[0][:1])))
    return prepared


def _local_norm(prepared: Prepared) -> float:
    """Return the norm of this rank's local gradients."""
    gradients = local_tensors(
        [parameter.grad for parameter in prepared.trainable.parameters if parameter.grad is not None]
    )
    return math.sqrt(sum(float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients))


def _axes_of_norm(
    code: CustomParallelize, norms: Sequence[float], used_norms: Sequence[float], norm: float
) -> tuple[str, ...] | None:
    """Return the axes over which the sum of squared local norms gives the norms that clipping used, or None."""
    coordinates = list(itertools.product(*(range(size) for size in code.axes.values())))
    names = list(code.axes)
    best: tuple[float, tuple[str, ...] | None] = 0.1 * max(abs(value - norm) for value in used_norms), None
    for axes in ((), *axis_sets(code)):
        fixed = [index for index, axis in enumerate(names) if axis not in axes]
        error = 0.0
        for coordinate, used_norm in zip(coordinates, used_norms, strict=True):
            group = [
                n
                for p, n in zip(coordinates, norms, strict=True)
                if all(p[index] == coordinate[index] for index in fixed)
            ]
            error = max(error, abs(math.sqrt(sum(value * value for value in group)) - used_norm))
        if error < best[0]:
            best = error, axes
    return best[1]


def _clipping_cause(prepared: Prepared, code: CustomParallelize, axes: Sequence[str]) -> str:
    """Explain the mistake in adding up squares over these axes."""
    named = {clean_name(name): parameter for name, parameter in prepared.model.named_parameters()}
    replicated = {
        axis: [name for name, parameter in named.items() if axis in replicated_axes(parameter, code.axes)]
        for axis in axes
    }
    repeated = [
        f"{len(names)} of {len(named)} parameters ({names[0]} first), which are equal on all ranks along {axis}, are "
        f"counted {code.axes[axis]} times"
        for axis, names in replicated.items()
        if names
    ]
    if not axes:
        return "each rank clips by the norm of its own parts; sum the squares over the axes that split parameters"
    if repeated:
        return f"the squares are summed over {' and '.join(axes)}, but {'; '.join(repeated)}"
    return f"the squares are summed over {' and '.join(axes)} only, but parameters are also split over other axes"
