"""The gradients of own parallel code, rank by rank: which lack what other ranks have, and where in backward it begins.

Each rank does one update of its own part, and one of the whole batch in one process, from the weights as they are
built. A gradient that the ranks hold in different versions is compared with one device by their sum and their mean. Of
the inputs and outputs of modules, in the order of backward, the first is named whose gradient is no part of that of one
device, and out of which no right gradient is computed.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.loop import wrap_user_errors
from everyrank.parallel.mesh import full_tensor
from everyrank.parallel.own import clean_name
from everyrank.parity.by_rank import ByRank, by_rank
from everyrank.parity.case import ParityCase
from everyrank.parity.module_events import Key, Recording, ancestors, is_part, shown
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather, broadcast_value

__all__ = ["gradients_by_rank"]

_NAMES = 3  # of tensors that are shown


def gradients_by_rank(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """`the gradients of 3 of 7 tensors (norm.weight first) differ between the ranks along tensor: ...`; "" where none
    does, or nothing can be said. A collective.
    """
    code = find_own_code(layout, world.size)
    like_layout = dataclasses.replace(layout, precision="float64", accumulate=1)
    own, of_own = _backward(case, like_layout, world, update)
    one, of_one = _backward(case, Layout("single", precision="float64"), single_process_world(world), update)
    names = [name for name in of_one if name in of_own and of_own[name].shape == of_one[name].shape]
    found = {name: by_rank(of_own[name], of_one[name], code, world) for name in names}
    said = [_about_parameters(found), _first_in_backward(own, one, code, world)]
    return "; ".join(text for text in said if text)


def _backward(case: ParityCase, layout: Layout, world: World, update: Update) -> tuple[Recording, dict[str, Tensor]]:
    """One update: what modules got and gave, with its gradients; and the gradient of each parameter."""
    with wrap_user_errors():
        prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    [batch] = next(batches_for_updates(*data))
    found = Recording(range(batch.start, batch.start + batch.size), batch.total, keeps_gradients=True)
    hooks = found.watch(prepared.model)
    prepared.trainable.phase_observers.append(lambda phase: setattr(found, "is_on", phase == "forward"))
    try:
        prepared.step([batch])
    finally:
        for hook in hooks:
            hook.remove()
    gradients = {
        clean_name(name): full_tensor(parameter.grad.detach()).clone()
        for name, parameter in prepared.model.named_parameters()
        if parameter.grad is not None
    }
    return found, gradients


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


def _first_in_backward(own: Recording, one: Recording, code: OwnCode, world: World) -> str:
    """The first module, in the order of backward, whose gradients are none of one device. A collective."""
    if code.contract.scale_loss is not None:
        return ""
    order = one.backward
    right = {key: _is_right(own, one, key) for key in own.backward}
    wrong = [key for key in own.backward if right[key] is False and key in order and not _is_repaired(own, key, right)]
    first = order.index(wrong[0]) if wrong else len(order)
    of_ranks = [int(found) for found in all_gather(torch.tensor([first]), world)]
    place = min(of_ranks)
    if place == len(order):
        return ""
    text = _about_backward(own, one, order[place], right) if first == place else ""
    return str(broadcast_value(of_ranks.index(place), text, world))


def _is_right(own: Recording, one: Recording, key: Key) -> bool | None:
    event, other = own.events[key], one.events.get(key)
    if other is None or not own.rows or not own.has_same_calls(one, key.name):
        return None
    return is_part(event.gradients, other.gradients, own.rows)


def _is_repaired(own: Recording, key: Key, right: dict[Key, bool | None]) -> bool:
    """Whether a tensor that this one is computed from gets the right gradient: parts of a sum, added up on the way."""
    event = own.events[key]
    before = ancestors(event.nodes)
    if any(node in before for other, is_right in right.items() if is_right for node in own.events[other].nodes):
        return True
    around = event.parent
    while around is not None:
        if right.get(around._replace(role="input")):
            return True
        around = own.events[around].parent if around in own.events else None
    return False


def _about_backward(own: Recording, one: Recording, key: Key, right: dict[Key, bool | None]) -> str:
    """In which module's backward it goes wrong: where modules take the tensor, in theirs; else in the one around it."""
    event = own.events[key]
    nodes = {node for node in event.nodes if node is not None}
    takers = [
        other
        for other, taken in own.events.items()
        if other.role == "input" and nodes.intersection(taken.nodes) and right.get(other._replace(role="output"))
    ]
    if takers:
        module = shown(takers[0], own.events[takers[0]].kind)
        return (
            f"in backward it goes wrong in {module}: its output gets the right gradient, and what it hands back to its "
            "input is another one"
        )
    around = one.events[key].parent
    inside = shown(around, one.events[around].kind) if around is not None and around in one.events else "the model"
    text = (
        f"in backward the first {key.role} that gets another gradient is that of {shown(key, event.kind)}, in {inside}"
    )
    done = own.backward[: own.backward.index(key)]
    before = [other for other in done if right[other] and other.name not in ("", key.name)]
    if not before:
        return text
    return text + f"; the one before, {shown(before[-1], own.events[before[-1]].kind)}, gets the right one"
