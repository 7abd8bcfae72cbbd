"""Own parallel code: its gradients are compared before its training, and what differs is traced to the mesh axes.

An optimizer that divides by the size of the gradient, or clipping, hides a gradient of the wrong scale. So the update
is the gradient itself first (SGD of learning rate 1, nothing clipped); a training that differs while those are equal
goes wrong in what comes after: clipping, or the optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.loop import run_updates, wrap_user_errors
from everyrank.parallel.init_model import shared_parameters
from everyrank.parallel.mesh import local_tensors
from everyrank.parallel.own import clean_name, replicated_axes, sum_squares_of_parts
from everyrank.parity.by_rank import long_axes
from everyrank.parity.case import ParityCase, by_gradient
from everyrank.parity.initial_state import listed
from everyrank.strategies import Prepared, prepare
from everyrank.workload import changed
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["cause_after_gradients", "cause_in_gradients", "gradients_of"]

_ROUNDING = 1e-6
_Tensors = dict[str, Tensor]


def gradients_of(case: ParityCase) -> ParityCase:
    """The case whose update is the gradient, not clipped; the same one for every layout of `case`."""
    if case.of_gradients is None:
        workload = changed(by_gradient(case.workload), clip_norm=None, ema_decay=None)
        case.of_gradients = dataclasses.replace(
            case,
            workload=workload,
            eval_ends=None,
            by_gradient=True,
            is_quick=True,
            notes=[],
            segments={},
            from_disk=set(),
            names={},
            references={},
        )
    return case.of_gradients


def cause_in_gradients(
    before: Sequence[_Tensors], after: Sequence[_Tensors], code: OwnCode, model: nn.Module, by_rank: str = ""
) -> str:
    """Why gradients differ: `before` and `after` are the states (of one device, of the layout) around one update.

    `model` is the one that is handed to the person's function; `by_rank` what `gradients_by_rank` says.
    """
    apart = _split_apart(after[1], model)
    if apart:
        return (
            f"{' and '.join(apart)} are one tensor as the model was built, and two as {code.place} leaves it; tie them "
            "again, or leave them out of the plan"
        )
    ratios = _ratios(before, after)
    wrong = {name: ratio for name, ratio in ratios.items() if ratio is None or abs(ratio - 1.0) > _ROUNDING}
    if not wrong:
        return "the gradients of one update are those of one device, and those of several are not"
    still = [name for name, ratio in wrong.items() if ratio == 0.0]
    if len(still) == len(wrong):
        return (
            f"{listed(still)} gets no gradient: it is not trained (requires_grad=False), or the loss of no rank "
            "depends on it"
        )
    who = "all" if len(wrong) == len(ratios) else f"{len(wrong)} of {len(ratios)}"
    first = next(iter(wrong.values()))
    is_one_multiple = first is not None and all(
        ratio is not None and abs(ratio - first) <= _ROUNDING * abs(first) for ratio in wrong.values()
    )
    if first is None or not is_one_multiple:
        what = by_rank or (
            "what each rank has of them was not added up, or they were computed from something else than on one device"
        )
        return (
            f"the gradients of {who} tensors ({next(iter(wrong))} first) are no multiple of those of one device: {what}"
        )
    subject = f"the gradient{'' if who == 'all' else f's of {who} tensors'}"
    return f"{subject}{' is' if who == 'all' else ' are'} {first:.4g} times that of one device{_of_ranks(code, first)}"


def _ratios(before: Sequence[_Tensors], after: Sequence[_Tensors]) -> dict[str, float | None]:
    """For each tensor: how many times the gradient of one device its gradient is; None where it is no multiple.

    1.0 where both are zero, None where only that of one device is.
    """
    found: dict[str, float | None] = {}
    for name, tensor in before[0].items():
        if not tensor.is_floating_point() or "running_" in name or name not in before[1]:
            continue
        own = (after[0][name] - tensor).double()
        other = (after[1][name] - before[1][name]).double()
        square = float((own * own).sum())
        if not square:
            found[name] = None if bool(other.any()) else 1.0
            continue
        ratio = float((own * other).sum()) / square
        is_multiple = float((other - ratio * own).norm()) <= _ROUNDING * max(1.0, abs(ratio)) * math.sqrt(square)
        found[name] = ratio if is_multiple else None
    return found


def _split_apart(state: _Tensors, model: nn.Module) -> list[str]:
    """Names of tensors that the model shares, and that are not equal any more; [] where all are."""
    for places in shared_parameters(model):
        names = [f"{module}.{name}".lstrip(".") for module, name in places]
        if all(name in state for name in names) and not all(torch.equal(state[names[0]], state[n]) for n in names):
            return names
    return []


def _of_ranks(code: OwnCode, ratio: float) -> str:
    """Along which axes there are as many ranks as a gradient is too large or too small, and what to do about it."""
    for axes in long_axes(code):
        size = math.prod(code.axes[axis] for axis in axes)
        if min(abs(ratio / size - 1), abs(ratio * size - 1)) > 1e-3:
            continue
        others = [
            axis for (axis,) in itertools.combinations(code.axes, 1) if code.axes[axis] == size and axis not in axes
        ]
        where = " x ".join(axes) + "".join(f" (or {axis})" for axis in others)
        said = {code.contract.gradient_over(axis) for axis in axes if code.contract.reads(axis) != "same"}
        if not said:
            how = "counted once on each of them" if ratio > 1 else "what one of them has of it"
            return f", as many as there are ranks along {where}, which read the same: it is {how}"
        place = axes[0]
        if ratio > 1 and said == {"mean"}:
            return (
                f", as many as there are ranks along {where}: it is a sum over them, and the contract says mean; "
                f"divide the loss by mesh[{place!r}].size() (scale_loss), or declare gradients={{{place!r}: 'sum'}}"
            )
        claim = "and the contract says sum; declare mean" if said == {"sum"} else "divided by them once too often"
        return f": {size} ranks stand along {where}, {claim}"
    return ""


def cause_after_gradients(case: ParityCase, layout: Layout, world: World, not_compared: Sequence[str] = ()) -> str:
    """Why a training differs whose gradients are those of one device. A collective.

    `not_compared` are the tensors whose gradients could not be compared.
    """
    code = find_own_code(layout, world.size)
    found = ""
    if code.contract.clip_grad_norm is not None and case.workload.clip_norm is not None:
        found = _cause_in_clipping(case, layout, world, code)
    if not found and not_compared:
        return (
            f"the gradients that were compared are those of one device; those of {listed(not_compared)} were not "
            "compared, because no DTensor says which part of them a rank has. Give the contract a gather(model, mesh) "
            "that puts them together"
        )
    return found or (
        "the gradients are those of one device, the updates are not: the optimizer looks at whole tensors where ranks "
        "have parts of them, or has not all parameters"
    )


def _cause_in_clipping(case: ParityCase, layout: Layout, world: World, code: OwnCode) -> str:
    """The norm that the person's function clips by, from how much it takes away; against those that it could be."""
    workload = changed(by_gradient(case.workload), clip_norm=None, ema_decay=None)
    free = _after_one_update(dataclasses.replace(case, workload=workload), layout, world)
    norm = float(sum_squares_of_parts(free.trainable.parameters).sqrt())
    own = _own_norm(free)
    limit = 0.1 * norm  # so that it has to clip
    clipped = _after_one_update(dataclasses.replace(case, workload=changed(workload, clip_norm=limit)), layout, world)
    left = _own_norm(clipped)
    taken = limit * own / left if left else math.inf
    rows = all_gather(torch.tensor([own, taken], dtype=torch.float64), world)
    norms, found = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
    worst = max(found, key=lambda one: abs(one - norm))
    if abs(worst - norm) <= 1e-4 * norm:
        return ""
    text = f"clip_grad_norm takes the norm of the gradients for {worst:.6g}, and it is {norm:.6g}"
    axes = _best(code, norms, found, norm)
    if axes is None:
        return text
    return f"{text}: {_about_axes(free, code, axes)}"


def _after_one_update(case: ParityCase, layout: Layout, world: World) -> Prepared:
    """The layout after the first update."""
    with wrap_user_errors():
        prepared = prepare(case.workload, dataclasses.replace(layout, precision="float64"), world)
    next(iter(run_updates(prepared, case.train_data, case.planned("float64")[0][:1])))
    return prepared


def _own_norm(prepared: Prepared) -> float:
    """The norm of this rank's own parts of the gradients."""
    gradients = local_tensors([one.grad for one in prepared.trainable.parameters if one.grad is not None])
    return math.sqrt(sum(float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients))


def _best(code: OwnCode, norms: Sequence[float], found: Sequence[float], norm: float) -> tuple[str, ...] | None:
    """The axes over which the squares of each rank's parts add up to what was found; None where no axes do."""
    places = list(itertools.product(*(range(size) for size in code.axes.values())))
    names = list(code.axes)
    best: tuple[float, tuple[str, ...] | None] = 0.1 * max(abs(one - norm) for one in found), None
    for axes in ((), *long_axes(code)):
        fixed = [index for index, axis in enumerate(names) if axis not in axes]
        off = 0.0
        for place, taken in zip(places, found, strict=True):
            group = [n for p, n in zip(places, norms, strict=True) if all(p[index] == place[index] for index in fixed)]
            off = max(off, abs(math.sqrt(sum(one * one for one in group)) - taken))
        if off < best[0]:
            best = off, axes
    return best[1]


def _about_axes(prepared: Prepared, code: OwnCode, axes: Sequence[str]) -> str:
    """What is wrong with adding up squares over these axes."""
    named = {clean_name(name): one for name, one in prepared.model.named_parameters()}
    alike = {axis: [name for name, one in named.items() if axis in replicated_axes(one, code.axes)] for axis in axes}
    counted = [
        f"{len(names)} of {len(named)} parameters ({names[0]} first), which all ranks along {axis} hold alike, are "
        f"counted {code.axes[axis]} times"
        for axis, names in alike.items()
        if names
    ]
    if not axes:
        return "each rank clips by the norm of its own parts; add up the squares over the axes that split parameters"
    if counted:
        return f"the squares are added up over {' and '.join(axes)}, and {'; '.join(counted)}"
    return f"the squares are added up over {' and '.join(axes)} alone, and parameters are split over other axes, too"
