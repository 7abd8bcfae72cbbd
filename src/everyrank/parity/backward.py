"""Compare the gradients of a custom parallelize function on each rank: missing reductions, first wrong module.

Each rank runs one update on its own slice of the batch, and one on the whole batch in one process, both from the
initial weights. If the ranks hold different gradients of a tensor, their sum and their mean are compared with one
device. Module inputs and outputs are then compared in the order of the backward pass. The first whose gradient is not
a part of that of one device is reported, unless a correct gradient is computed from it later.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import CustomParallelize, Layout, find_custom_parallelize
from everyrank.loop import wrap_user_errors
from everyrank.parallel.custom import clean_name
from everyrank.parallel.mesh import full_tensor
from everyrank.parity.case import ParityCase
from everyrank.parity.module_events import Key, Recording, ancestors, is_part, module_label
from everyrank.parity.rank_comparison import RankComparison, compare_ranks
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather, broadcast_value

__all__ = ["gradients_by_rank"]

_MAX_NAMES = 3  # tensor names in a message


def gradients_by_rank(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """Return a message such as `the gradients of 3 of 7 tensors (norm.weight first) differ between the ranks along
    tensor: ...`, or "" if none differs or the cause is unknown. A collective.
    """
    code = find_custom_parallelize(layout, world.size)
    float64_layout = dataclasses.replace(layout, precision="float64", accumulate=1)
    local, local_gradients = _backward(case, float64_layout, world, update)
    expected, expected_gradients = _backward(
        case, Layout("single", precision="float64"), single_process_world(world), update
    )
    names = [
        name
        for name in expected_gradients
        if name in local_gradients and local_gradients[name].shape == expected_gradients[name].shape
    ]
    comparisons = {name: compare_ranks(local_gradients[name], expected_gradients[name], code, world) for name in names}
    sentences = [_describe_parameters(comparisons), _first_wrong_module(local, expected, code, world)]
    return "; ".join(text for text in sentences if text)


def _backward(case: ParityCase, layout: Layout, world: World, update: Update) -> tuple[Recording, dict[str, Tensor]]:
    """Run one update. Return the inputs and outputs of modules with their gradients, and the parameters' gradients."""
    with wrap_user_errors():
        prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    [batch] = next(batches_for_updates(*data))
    recording = Recording(range(batch.start, batch.start + batch.size), batch.total, keeps_gradients=True)
    hooks = recording.register_hooks(prepared.model)
    prepared.trainable.phase_observers.append(lambda phase: setattr(recording, "is_on", phase == "forward"))
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
    return recording, gradients


def _describe_parameters(comparisons: dict[str, RankComparison]) -> str:
    differ = [name for name, comparison in comparisons.items() if comparison.differing_axes]
    if not differ:
        return ""
    axes = dict.fromkeys(axis for name in differ for axis in comparisons[name].differing_axes)
    text = (
        f"the gradients of {_name_list(differ, len(comparisons))} differ between the ranks along {' and '.join(axes)}"
    )
    for reduction, reason in (
        ("sum", "each rank has a part, and the parts are not summed"),
        ("mean", "they are not averaged"),
    ):
        matching_names = [name for name in differ if comparisons[name].reduction == reduction]
        if matching_names:
            axes_text = " x ".join(comparisons[matching_names[0]].reducing_axes)
            of_names = "" if len(matching_names) == len(differ) else f" of {', '.join(matching_names[:_MAX_NAMES])}"
            return f"{text}, but the {reduction} over {axes_text}{of_names} equals that of one device: {reason}"
    return text


def _name_list(names: list[str], total: int) -> str:
    """`3 of 7 tensors (norm.weight first)`."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    return f"{'all' if len(names) == total else f'{len(names)} of {total}'} tensors ({names[0]} first)"


def _first_wrong_module(local: Recording, expected: Recording, code: CustomParallelize, world: World) -> str:
    """Describe the first module, in backward order, whose gradient differs from one device. A collective."""
    if code.contract.scale_loss is not None:
        return ""
    order = expected.backward
    right = {key: _is_right(local, expected, key) for key in local.backward}
    wrong = [
        key for key in local.backward if right[key] is False and key in order and not _is_repaired(local, key, right)
    ]
    first = order.index(wrong[0]) if wrong else len(order)
    first_on_ranks = [int(index) for index in all_gather(torch.tensor([first]), world)]
    earliest = min(first_on_ranks)
    if earliest == len(order):
        return ""
    text = _describe_backward(local, expected, order[earliest], right) if first == earliest else ""
    return str(broadcast_value(first_on_ranks.index(earliest), text, world))


def _is_right(local: Recording, expected: Recording, key: Key) -> bool | None:
    local_event, expected_event = local.events[key], expected.events.get(key)
    if expected_event is None or not local.samples or not local.has_same_calls(expected, key.name):
        return None
    return is_part(local_event.gradients, expected_event.gradients, local.samples)


def _is_repaired(local: Recording, key: Key, right: dict[Key, bool | None]) -> bool:
    """Whether an ancestor of this tensor has the right gradient: an all-reduce on the way has added up the parts."""
    event = local.events[key]
    ancestor_nodes = ancestors(event.nodes)
    if any(
        node in ancestor_nodes for other, is_right in right.items() if is_right for node in local.events[other].nodes
    ):
        return True
    enclosing_call = event.parent
    while enclosing_call is not None:
        if right.get(enclosing_call._replace(role="input")):
            return True
        enclosing_call = local.events[enclosing_call].parent if enclosing_call in local.events else None
    return False


def _describe_backward(local: Recording, expected: Recording, key: Key, right: dict[Key, bool | None]) -> str:
    """Name the module whose backward is wrong: one that takes the tensor as input, else the module around it."""
    event = local.events[key]
    nodes = {node for node in event.nodes if node is not None}
    consumers = [
        other
        for other, consumer_event in local.events.items()
        if other.role == "input"
        and nodes.intersection(consumer_event.nodes)
        and right.get(other._replace(role="output"))
    ]
    if consumers:
        module = module_label(consumers[0], local.events[consumers[0]].kind)
        return f"in backward {module} is wrong: its output gets the right gradient, and its input a wrong one"
    enclosing_call = expected.events[key].parent
    enclosing_module = (
        module_label(enclosing_call, expected.events[enclosing_call].kind)
        if enclosing_call is not None and enclosing_call in expected.events
        else "the model"
    )
    module = module_label(key, event.kind)
    text = f"the first wrong gradient in backward is that of the {key.role} of {module}, in {enclosing_module}"
    earlier_keys = local.backward[: local.backward.index(key)]
    right_keys = [other for other in earlier_keys if right[other] and other.name not in ("", key.name)]
    if not right_keys:
        return text
    return (
        text
        + f"; the gradient before it, of {module_label(right_keys[-1], local.events[right_keys[-1]].kind)}, is right"
    )
