"""The first module inside which a forward pass goes wrong: for a loss that differs before any weight does.

Each rank runs one forward pass of its own part, and one of the whole batch in one process, from the weights as they are
built. Inputs and outputs of all modules are compared. The first that differs, and out of which nothing right is
computed, is where it goes wrong. It is said what it is instead, where that can be told: a part of a sum, a bias that
was added several times, features of other samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.parity.by_rank import ROUNDING, by_rank, long_axes
from everyrank.parity.case import ParityCase
from everyrank.parity.module_events import Key, ModuleEvent, Recording, ancestors, is_part, of_rows, parts_of, shown
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather, broadcast_value

__all__ = ["first_output_that_differs"]


def first_output_that_differs(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """`the first output that differs is that of blocks.0.norm (BatchNorm1d), on rank 0`; "" where none does.

    A collective.
    """
    code = find_own_code(layout, world.size)
    own = _forward(case, layout, world, update)
    one = _forward(case, Layout("single", precision="float64"), single_process_world(world), update)
    is_whole = own.has_all and not any(code.contract.reads(axis) == "sequence" for axis in code.axes)
    right = _compared(own, one, is_whole)
    keys = list(one.events)
    wrong = _unrepaired(own, right)
    first = keys.index(wrong[0]) if wrong else len(keys)
    of_ranks = [int(found) for found in all_gather(torch.tensor([first]), world)]
    place = min(of_ranks)
    if place == len(keys):
        has_output = [row.tolist() == [1] for row in all_gather(torch.tensor([int(_has_right_output(right))]), world)]
        return "the output of the model is that of one device: it goes wrong in the loss" if all(has_output) else ""
    ranks = [rank for rank, found in enumerate(of_ranks) if found == place]
    text = _about(own, one, keys[place], right, code, world, ranks)
    padded = _padded(own, one, keys[:place], code)
    return str(broadcast_value(ranks[0], text + (f"; {padded}" if padded else ""), world))


def _has_right_output(right: dict[Key, bool | None]) -> bool:
    return right.get(Key("", 0, "output")) is True


def _forward(case: ParityCase, layout: Layout, world: World, update: Update) -> Recording:
    prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    batch = next(batches_for_updates(*data))[0]
    found = Recording(range(batch.start, batch.start + batch.size), batch.total)
    hooks = found.watch(prepared.model)
    try:
        prepared.predict(batch)  # with autograd's graph, which tells what is computed from what
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _compared(own: Recording, one: Recording, is_whole: bool) -> dict[Key, bool | None]:
    """Of each input and output whether it is a part of that of one device; None where that cannot be told."""
    found: dict[Key, bool | None] = {}
    for key, event in own.events.items():
        other = one.events.get(key)
        is_known = other is not None and bool(own.rows) and own.has_same_calls(one, key.name)
        found[key] = (
            is_part(event.values, other.values, own.rows, is_whole, in_order=not key.name)
            if is_known and other is not None
            else None
        )
    return found


def _unrepaired(own: Recording, right: dict[Key, bool | None]) -> list[Key]:
    """What differs and out of which nothing right is computed, in order.

    A part of a sum that a function adds up, positions that come back into order: what follows is right again.
    """
    repaired = ancestors(node for key, event in own.events.items() if right[key] for node in event.nodes)
    found: list[Key] = []
    for key, event in own.events.items():
        if right[key] is not False or any(node in repaired for node in event.nodes if node is not None):
            continue
        around = event.parent
        while around is not None and not right.get(around):
            around = own.events[around].parent if around in own.events else None
        if around is None:
            found.append(key)
    return found


def _about(
    own: Recording,
    one: Recording,
    key: Key,
    right: dict[Key, bool | None],
    code: OwnCode,
    world: World,
    ranks: Sequence[int],
) -> str:
    """Where it goes wrong, and what is there instead; that of `ranks[0]` counts. A collective."""
    event, expected = own.events.get(key), one.events[key]
    module, where = shown(key, (event or expected).kind), f"on rank {', '.join(map(str, ranks))}"
    instead = _instead(own, event, expected, code, world)
    if key.role == "input":
        around = one.events.get(expected.parent) if expected.parent is not None else None
        inside = shown(around.key, around.kind) if around is not None else "the model"
        what = f"the first input that differs is that of {module}, {where}: it goes wrong in {inside}, before that"
        return what + (f"; {instead}" if instead else "")
    what = f"the first output that differs is that of {module}, {where}"
    if "BatchNorm" in expected.kind:
        return f"{what}: batch norm over one rank's samples alone (SyncBatchNorm spans all)"
    if "Dropout" in expected.kind and event is not None and _is_smaller(event, expected):
        return (
            f"{what}: its masks are others. It gets a plain tensor that {code.place} has split, and takes it for a "
            'whole one: make it a DTensor, or compare without dropout (Workload(dropout="torch"))'
        )
    is_input_right = right.get(key._replace(role="input")) is True
    return what + (", whose input is right" if is_input_right else "") + (f": {instead}" if instead else "")


def _is_smaller(event: ModuleEvent, expected: ModuleEvent) -> bool:
    return any(
        part is not None and whole is not None and part.numel() < whole.numel()
        for part, whole in zip(event.values, expected.values, strict=False)
    )


# --- what it is instead


def _instead(own: Recording, event: ModuleEvent | None, expected: ModuleEvent, code: OwnCode, world: World) -> str:
    """What the first tensor that differs is, where one device has another; on this rank. A collective."""
    values = zip(event.values, expected.values, strict=False) if event is not None else ()
    pairs = [(part, whole) for part, whole in values if part is not None and whole is not None]
    part, whole = next((one for one in pairs if is_part([one[0]], [one[1]], own.rows) is False), (None, None))
    if part is None or whole is None:
        part, whole = pairs[0] if pairs else (None, None)
    can_add = part is not None and whole is not None and part.shape == of_rows(part, whole, own.rows).shape
    sizes = all_gather(torch.tensor([part.numel() if part is not None and can_add else -1]), world)
    if len({int(size) for size in sizes}) == 1 and part is not None and whole is not None and can_add:
        found = by_rank(part, of_rows(part, whole, own.rows), code, world)
        if found.how:
            over = " x ".join(found.completes)
            why = "each rank has a part, and nothing adds them up" if found.how == "sum" else "nothing averages them"
            return f"the {found.how} of the ranks' over {over} is that of one device: {why}"
    if part is None or whole is None:
        return ""
    return _times(part, whole, own, expected.bias, code) or _of_others(part, whole, own.rows)


def _is_near(part: Tensor, one: Tensor, whole: Tensor) -> bool:
    return float((part - one).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def _times(part: Tensor, whole: Tensor, own: Recording, bias: Tensor | None, code: OwnCode) -> str:
    """Whether it is a multiple of what it should be, or has a multiple of the layer's bias too much."""
    expected = of_rows(part, whole, own.rows)
    if part.shape != expected.shape:
        return ""
    if not part.dim():
        return _about_number(float(part), float(whole), code)
    times = _multiple(part, expected, expected)
    if times is not None:
        return f"it is {times:.4g} times that of one device{_as_many(code, times)}"
    if bias is not None and bias.dim() == 1 and part.shape[-1] == len(bias):
        more = _multiple(part - expected, bias.expand_as(part), expected)
        if more is not None:
            return (
                f"as if its bias were added {1 + more:.4g} times{_as_many(code, 1 + more)}: add it after the all-reduce"
            )
    return ""


def _about_number(own: float, one: float, code: OwnCode) -> str:
    text = f"{own:.6g}, and {one:.6g} on one device"
    for axes in long_axes(code):
        size = math.prod(code.axes[axis] for axis in axes)
        if abs(own - one - math.log(size)) <= ROUNDING * max(1.0, abs(own)):
            return (
                f"{text}, more by log({size}): a softmax counts each class {size} times, once along {' x '.join(axes)}"
            )
    return text


def _multiple(part: Tensor, unit: Tensor, whole: Tensor) -> float | None:
    """c, where `part` is c times `unit`; None where it is no multiple."""
    square = float((unit * unit).sum())
    times = float((part * unit).sum()) / square if square else 0.0
    return times if times and _is_near(part, times * unit, whole) else None


def _as_many(code: OwnCode, times: float) -> str:
    for axes in long_axes(code):
        size = math.prod(code.axes[axis] for axis in axes)
        if min(abs(times / size - 1), abs(times * size - 1)) < 1e-6:
            return f", as many as there are ranks along {' x '.join(axes)}"
    return ""


def _of_others(part: Tensor, whole: Tensor, rows: range) -> str:
    """Whether a half (a third, ...) of its features are features of other samples, or other features."""
    if part.dim() < 2 or len(part) != len(rows) or part.shape[1:] != whole.shape[1:] or len(whole) % len(rows):
        return ""
    width = part.shape[-1]
    for count in (count for count in range(2, width + 1) if width % count == 0):
        size = width // count
        pieces = [part[..., start : start + size] for start in range(0, width, size)]
        found = [next((at for at, one in parts_of(whole, p.shape) if _is_near(p, one, whole)), None) for p in pieces]
        for number, at in enumerate(found):
            if at is not None and None not in found and (at[0], at[-1]) != (rows.start, number * size):
                there = f"features {at[-1]} to {at[-1] + size - 1} of samples {at[0]} to {at[0] + len(rows) - 1}"
                return (
                    f"its features {number * size} to {number * size + size - 1} are {there}, and the samples are "
                    f"{rows.start} to {rows.stop - 1}: gathered over another axis than it was split along"
                )
    return ""


def _padded(own: Recording, one: Recording, keys: Sequence[Key], code: OwnCode) -> str:
    """A layer before that gives more features in parts than one device has: the padding may be counted."""
    for key in (key for key in keys if key.role == "output" and key in own.events):
        pairs = zip(own.events[key].values[:1], one.events[key].values[:1], strict=False)
        for part, whole in pairs:
            if part is None or whole is None or not part.dim() or part.dim() != whole.dim():
                continue
            for axes in long_axes(code):
                wide, size = part.shape[-1] * math.prod(code.axes[axis] for axis in axes), whole.shape[-1]
                if size < wide < size + part.shape[-1] and size % part.shape[-1]:
                    return (
                        f"{shown(key, own.events[key].kind)} gives {wide} features in parts along {' x '.join(axes)}, "
                        f"and {size} on one device: does what is padded count?"
                    )
    return ""
