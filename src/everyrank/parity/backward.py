"""The gradients of own parallel code, rank by rank: which lack what other ranks have, and where in backward it begins.

Each rank does one update of its own part, and one of the whole batch in one process, from the weights as they are
built. A gradient that the ranks hold in different versions is held against one device by their sum and their mean; of
the outputs of modules, in the order of backward, the first is named whose gradient is no part of that of one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Update, batches_for_updates
from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.loop import wrap_user_errors
from everyrank.parallel.mesh import full_tensor
from everyrank.parallel.own import clean_name
from everyrank.parity.by_rank import ByRank, by_rank
from everyrank.parity.case import ParityCase
from everyrank.parity.outputs import is_part, local_part
from everyrank.parity.rows import leaves
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather

__all__ = ["gradients_by_rank"]

_NAMES = 3  # of tensors that are shown


@dataclasses.dataclass
class _Backward:
    """One update: the gradient of each parameter, those of the outputs of modules in the order of backward."""

    parameters: dict[str, Tensor]
    outputs: dict[str, list[Tensor | None]]
    kinds: dict[str, str]
    rows: range


def gradients_by_rank(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """`the gradients of 3 of 7 tensors (norm.weight first) differ between the ranks along tensor: ...`; "" where none
    does, or nothing can be said. A collective.
    """
    code = find_own_code(layout, world.size)
    own = _backward(case, dataclasses.replace(layout, precision="float64", accumulate=1), world, update)
    one = _backward(case, Layout("single", precision="float64"), single_process_world(world), update)
    names = [name for name in one.parameters if name in own.parameters]
    names = [name for name in names if own.parameters[name].shape == one.parameters[name].shape]
    found = {name: by_rank(own.parameters[name], one.parameters[name], code, world) for name in names}
    said = [_about_parameters(found), _first_in_backward(own, one, code, world)]
    return "; ".join(text for text in said if text)


def _backward(case: ParityCase, layout: Layout, world: World, update: Update) -> _Backward:
    with wrap_user_errors():
        prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    [batch] = next(batches_for_updates(*data))
    found = _Backward({}, {}, {}, range(batch.start, batch.start + batch.size))
    hooks = [_watch(module, clean_name(name), found) for name, module in prepared.model.named_modules() if name]
    try:
        prepared.step([batch])
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in prepared.model.named_parameters():
        if parameter.grad is not None:
            found.parameters[clean_name(name)] = full_tensor(parameter.grad.detach()).clone()
    return found


def _watch(module: nn.Module, name: str, found: _Backward) -> Any:
    def forward_done(_: nn.Module, __: Any, output: Any) -> None:
        found.kinds[name] = type(module).__name__.removeprefix("FSDP")
        for leaf in leaves(output):
            if leaf.is_floating_point() and leaf.requires_grad:
                leaf.register_hook(seen)

    def seen(gradient: Tensor) -> None:
        found.outputs.setdefault(name, []).append(local_part(gradient))

    return module.register_forward_hook(forward_done)


def _about_parameters(found: dict[str, ByRank]) -> str:
    differ = [name for name, one in found.items() if one.differ]
    if not differ:
        return ""
    axes = dict.fromkeys(axis for name in differ for axis in found[name].differ)
    text = f"the gradients of {_listed(differ, len(found))} differ between the ranks along {' and '.join(axes)}"
    for how, why in (("sum", "each rank has a part, and nothing adds them up"), ("mean", "nothing averages them")):
        completed = [name for name in differ if found[name].how == how]
        if completed:
            over = " x ".join(found[completed[0]].completes)
            of_them = "their" if len(completed) == len(differ) else f"of {', '.join(completed[:_NAMES])} the"
            return f"{text}, and {of_them} {how} over {over} is that of one device: {why}"
    return text


def _listed(names: list[str], total: int) -> str:
    """`3 of 7 tensors (norm.weight first)`."""
    if len(names) <= _NAMES:
        return ", ".join(names)
    return f"{'all' if len(names) == total else f'{len(names)} of {total}'} tensors ({names[0]} first)"


def _first_in_backward(own: _Backward, one: _Backward, code: OwnCode, world: World) -> str:
    """The first output, in the order of backward, whose gradient is none of one device, and the one before it."""
    if code.contract.scale_loss is not None:
        return ""
    order = list(one.outputs)
    known = [name for name in order if name in own.outputs and len(own.outputs[name]) == len(one.outputs[name])]
    wrong = [name for name in known if own.rows and not is_part(own.outputs[name], one.outputs[name], own.rows)]
    place = min(
        int(found) for found in all_gather(torch.tensor([order.index(wrong[0]) if wrong else len(order)]), world)
    )
    if place == len(order) or order[place] not in own.kinds:
        return ""
    before = [name for name in known if order.index(name) < place]
    text = (
        f"in backward the first output that gets another gradient is that of {order[place]} ({own.kinds[order[place]]})"
    )
    return text + (f"; the one before, {before[-1]} ({own.kinds[before[-1]]}), gets the right one" if before else "")
