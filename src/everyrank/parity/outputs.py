"""Find the first module whose output differs from that on one device, if the loss differs and the weights are equal.

Each rank runs two forward passes from the initial weights: one on its slice of the batch, as the layout does, and one
on the whole batch, as a single process. Inputs and outputs of all modules are compared. The first one that differs is
reported, unless a correct tensor is computed from it later. If possible the message describes the difference: one term
of a sum, a bias that was added several times, features of different samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import CustomParallelize, Layout, find_custom_parallelize
from everyrank.parity.case import ParityCase
from everyrank.parity.module_events import (
    Key,
    ModuleEvent,
    Recording,
    ancestors,
    equally_sized_parts,
    is_part,
    local_samples,
    module_label,
)
from everyrank.parity.rank_comparison import ROUNDING, axes_of_ratio, axis_sets, compare_ranks, ratio_text
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather, broadcast_value

__all__ = ["first_output_that_differs"]


def first_output_that_differs(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """Return a message about the first input or output that differs from one device, or "" if unknown. A collective.

    For example: `the first output that differs is that of blocks.0.norm (BatchNorm1d), on rank 0: ...`.
    """
    code = find_custom_parallelize(layout, world.size)
    local = _forward(case, layout, world, update)
    expected = _forward(case, Layout("single", precision="float64"), single_process_world(world), update)
    is_whole = local.has_all_samples and not any(code.contract.reads(axis) == "sequence" for axis in code.axes)
    is_correct = _compare_modules(local, expected, is_whole)
    keys = list(expected.events)
    wrong = _unrepaired(local, is_correct)
    first_wrong_index = keys.index(wrong[0]) if wrong else len(keys)
    first_on_ranks = [int(index) for index in all_gather(torch.tensor([first_wrong_index]), world)]
    earliest = min(first_on_ranks)
    if earliest == len(keys):
        has_output = [
            row.tolist() == [1] for row in all_gather(torch.tensor([int(_has_correct_output(is_correct))]), world)
        ]
        return (
            "the output of the model equals that of one device: the difference is in the loss"
            if all(has_output)
            else ""
        )
    ranks = [rank for rank, index in enumerate(first_on_ranks) if index == earliest]
    text = _describe(local, expected, keys[earliest], is_correct, code, world, ranks)
    padding_note = _padded_layer(local, expected, keys[:earliest], code)
    return str(broadcast_value(ranks[0], text + (f"; {padding_note}" if padding_note else ""), world))


def _has_correct_output(is_correct: dict[Key, bool | None]) -> bool:
    return is_correct.get(Key("", 0, "output")) is True


def _forward(case: ParityCase, layout: Layout, world: World, update: Update) -> Recording:
    prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    batch = next(batches_for_updates(*data))[0]
    recording = Recording(range(batch.start, batch.start + batch.size), batch.total)
    hooks = recording.register_hooks(prepared.model)
    try:
        prepared.predict(batch)  # with gradients enabled: the graph shows which tensors depend on each other
    finally:
        for hook in hooks:
            hook.remove()
    return recording


def _compare_modules(local: Recording, expected: Recording, is_whole: bool) -> dict[Key, bool | None]:
    """For each input and output: whether it is a part of the one-device tensor; None if it cannot be decided."""
    result: dict[Key, bool | None] = {}
    for key, event in local.events.items():
        other = expected.events.get(key)
        is_known = other is not None and bool(local.samples) and local.has_same_calls(expected, key.name)
        result[key] = (
            is_part(event.values, other.values, local.samples, is_whole, in_order=not key.name)
            if is_known and other is not None
            else None
        )
    return result


def _unrepaired(local: Recording, is_correct: dict[Key, bool | None]) -> list[Key]:
    """Return, in order, the wrong tensors that no later step corrects.

    For example, an all-reduce turns the terms of the ranks into the correct sum.
    """
    repaired = ancestors(node for key, event in local.events.items() if is_correct[key] for node in event.nodes)
    result: list[Key] = []
    for key, event in local.events.items():
        if is_correct[key] is not False or any(node in repaired for node in event.nodes if node is not None):
            continue
        enclosing_call = event.parent
        while enclosing_call is not None and not is_correct.get(enclosing_call):
            enclosing_call = local.events[enclosing_call].parent if enclosing_call in local.events else None
        if enclosing_call is None:
            result.append(key)
    return result


def _describe(
    local: Recording,
    expected: Recording,
    key: Key,
    is_correct: dict[Key, bool | None],
    code: CustomParallelize,
    world: World,
    ranks: Sequence[int],
) -> str:
    """Describe the module that differs and how; the message of `ranks[0]` is used. A collective."""
    event, expected_event = local.events.get(key), expected.events[key]
    module, on_ranks = module_label(key, (event or expected_event).kind), f"on rank {', '.join(map(str, ranks))}"
    difference = _describe_difference(local, event, expected_event, code, world)
    if key.role == "input":
        enclosing_event = expected.events.get(expected_event.parent) if expected_event.parent is not None else None
        caller = module_label(enclosing_event.key, enclosing_event.kind) if enclosing_event is not None else "the model"
        text = f"the first tensor that differs is the input of {module}, {on_ranks}: the mistake is in {caller}"
        return text + (f"; {difference}" if difference else "")
    text = f"the first output that differs is that of {module}, {on_ranks}"
    if "BatchNorm" in expected_event.kind:
        return f"{text}: batch norm over one rank's samples only (SyncBatchNorm uses those of all ranks)"
    if "Dropout" in expected_event.kind and event is not None and _is_smaller(event, expected_event):
        return (
            f"{text}: the dropout masks differ. {code.path} passes a shard as a plain tensor, so dropout draws a "
            "mask for the shard instead of the whole tensor. Make the shard a DTensor, or compare without dropout: "
            'Workload(dropout="torch")'
        )
    is_input_correct = is_correct.get(key._replace(role="input")) is True
    return text + (", whose input is right" if is_input_correct else "") + (f": {difference}" if difference else "")


def _is_smaller(event: ModuleEvent, expected: ModuleEvent) -> bool:
    return any(
        local is not None and whole is not None and local.numel() < whole.numel()
        for local, whole in zip(event.values, expected.values, strict=False)
    )


# --- how the difference is described


def _describe_difference(
    recording: Recording, event: ModuleEvent | None, expected: ModuleEvent, code: CustomParallelize, world: World
) -> str:
    """Describe how the first differing tensor of this rank relates to the one-device tensor. A collective."""
    values = zip(event.values, expected.values, strict=False) if event is not None else ()
    pairs = [(local, whole) for local, whole in values if local is not None and whole is not None]
    local, whole = next(
        (pair for pair in pairs if is_part([pair[0]], [pair[1]], recording.samples) is False), (None, None)
    )
    if local is None or whole is None:
        local, whole = pairs[0] if pairs else (None, None)
    has_local_shape = (
        local is not None and whole is not None and local.shape == local_samples(local, whole, recording.samples).shape
    )
    sizes = all_gather(torch.tensor([local.numel() if local is not None and has_local_shape else -1]), world)
    if len({int(size) for size in sizes}) == 1 and local is not None and whole is not None and has_local_shape:
        comparison = compare_ranks(local, local_samples(local, whole, recording.samples), code, world)
        if comparison.reduction:
            axes_text = " x ".join(comparison.reducing_axes)
            reason = (
                "each rank has a part, and the parts are not summed"
                if comparison.reduction == "sum"
                else "they are not averaged"
            )
            return f"the {comparison.reduction} over {axes_text} equals the output of one device: {reason}"
    if local is None or whole is None:
        return ""
    return _multiple_cause(local, whole, recording, expected.bias, code) or _misplaced_features(
        local, whole, recording.samples
    )


def _is_near(local: Tensor, expected: Tensor, whole: Tensor) -> bool:
    return float((local - expected).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def _multiple_cause(
    local: Tensor, whole: Tensor, recording: Recording, bias: Tensor | None, code: CustomParallelize
) -> str:
    """Describe a tensor that is a multiple of the expected one, or has the layer's bias added several times."""
    expected = local_samples(local, whole, recording.samples)
    if local.shape != expected.shape:
        return ""
    if not local.dim():
        return _describe_scalar(float(local), float(whole), code)
    factor = _multiple(local, expected, expected)
    if factor is not None:
        return f"it is {factor:.4g} times that of one device{_matching_axes(code, factor)}"
    if bias is not None and bias.dim() == 1 and local.shape[-1] == len(bias):
        bias_factor = _multiple(local - expected, bias.expand_as(local), expected)
        if bias_factor is not None:
            axes = _matching_axes(code, 1 + bias_factor)
            return f"as if its bias were added {1 + bias_factor:.4g} times{axes}: add it after the all-reduce"
    return ""


def _describe_scalar(local: float, expected: float, code: CustomParallelize) -> str:
    text = f"{local:.6g}, and {expected:.6g} on one device"
    for axes in axis_sets(code):
        size = math.prod(code.axes[axis] for axis in axes)
        if abs(local - expected - math.log(size)) <= ROUNDING * max(1.0, abs(local)):
            along = " x ".join(axes)
            how = f"the softmax counts each class {size} times, once per rank along {along}"
            return f"{text}, larger by log({size}): {how}"
    return text


def _multiple(local: Tensor, unit: Tensor, whole: Tensor) -> float | None:
    """Return c if `local` is c times `unit`, else None."""
    square = float((unit * unit).sum())
    factor = float((local * unit).sum()) / square if square else 0.0
    return factor if factor and _is_near(local, factor * unit, whole) else None


def _matching_axes(code: CustomParallelize, factor: float) -> str:
    axes = axes_of_ratio(code, factor, 1e-6)
    return f", {ratio_text(factor)} along {' x '.join(axes)}" if axes else ""


def _misplaced_features(local: Tensor, whole: Tensor, rows: range) -> str:
    """Describe a group of features that belongs to other samples, or to another position, in the one-device tensor.

    The features are split into equal groups. Returns "" unless each of them occurs in the one-device tensor.
    """
    if local.dim() < 2 or len(local) != len(rows) or local.shape[1:] != whole.shape[1:] or len(whole) % len(rows):
        return ""
    width = local.shape[-1]
    for count in (count for count in range(2, width + 1) if width % count == 0):
        size = width // count
        feature_groups = [local[..., start : start + size] for start in range(0, width, size)]
        starts_of_groups = [
            next(
                (
                    starts
                    for starts, candidate in equally_sized_parts(whole, group.shape)
                    if _is_near(group, candidate, whole)
                ),
                None,
            )
            for group in feature_groups
        ]
        for number, starts in enumerate(starts_of_groups):
            if starts is None or None in starts_of_groups:
                continue
            sample, feature = starts[0], starts[-1]
            if (sample, feature) != (rows.start, number * size):
                text = f"its features {number * size} to {number * size + size - 1} are features {feature} to "
                text += f"{feature + size - 1} of "
                if sample == rows.start:
                    return f"{text}the same samples on one device: the parts of the ranks are in a different order"
                return (
                    f"{text}samples {sample} to {sample + len(rows) - 1}, but this rank has "
                    f"samples {rows.start} to {rows.stop - 1}: gathered over a different axis than it was split along"
                )
    return ""


def _padded_layer(local: Recording, expected: Recording, keys: Sequence[Key], code: CustomParallelize) -> str:
    """Describe an earlier layer with more features over all ranks than on one device, which may be padding."""
    for key in (key for key in keys if key.role == "output" and key in local.events):
        pairs = zip(local.events[key].values[:1], expected.events[key].values[:1], strict=False)
        for output, whole in pairs:
            if output is None or whole is None or not output.dim() or output.dim() != whole.dim():
                continue
            for axes in axis_sets(code):
                width_over_ranks, size = output.shape[-1] * math.prod(code.axes[axis] for axis in axes), whole.shape[-1]
                if size < width_over_ranks < size + output.shape[-1] and size % output.shape[-1]:
                    module = module_label(key, local.events[key].kind)
                    return (
                        f"{module} has {width_over_ranks} output features over the ranks along {' x '.join(axes)}, "
                        f"and {size} on one device: is the padding counted?"
                    )
    return ""
