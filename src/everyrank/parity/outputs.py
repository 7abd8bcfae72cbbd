"""The first module whose output is not what it is on one device: for a loss that differs before any weight does.

Each rank runs one forward pass of its own part, and one of the whole batch in one process, from the weights as they are
built. What it has of an output may be some of the samples, of the positions or of the features: a part of the whole is
looked for. Of the first that is none it is said what it is instead, where that can be told: a part of a sum, a bias
that was added several times, features of other samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.parallel.own import clean_name
from everyrank.parity.by_rank import ROUNDING, by_rank, long_axes
from everyrank.parity.case import ParityCase
from everyrank.parity.rows import leaves
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather, broadcast_value

__all__ = ["first_output_that_differs", "is_part", "local_part"]


@dataclasses.dataclass
class _Forward:
    """What each module gives for the `rows` of the batch that a rank has, its type, and its bias where it has one."""

    outputs: dict[str, list[Tensor | None]]
    kinds: dict[str, str]
    biases: dict[str, Tensor]
    rows: range
    total: int

    @property
    def has_all(self) -> bool:
        """Whether these are all samples of the batch."""
        return len(self.rows) == self.total


def first_output_that_differs(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """`blocks.0.norm (BatchNorm1d)`, the first in the order in which they are done; "" where none is. A collective."""
    code = find_own_code(layout, world.size)
    own = _forward(case, layout, world, update)
    one = _forward(case, Layout("single", precision="float64"), single_process_world(world), update)
    names = [name for name in own.outputs if name in one.outputs]
    is_whole = own.has_all and not any(code.contract.reads(axis) == "sequence" for axis in code.axes)
    differs = [n for n in names if own.rows and not is_part(own.outputs[n], one.outputs[n], own.rows, is_whole)]
    first = names.index(differs[0]) if differs else len(names)
    of_ranks = [int(found) for found in all_gather(torch.tensor([first]), world)]
    place = min(of_ranks)
    if place == len(names):
        return ""
    ranks = [rank for rank, found in enumerate(of_ranks) if found == place]
    name, listed = names[place], ", ".join(map(str, ranks))
    what = f"the first output that differs is that of {name} ({own.kinds[name]}), on rank {listed}"
    if "BatchNorm" in own.kinds[name]:
        return f"{what}: batch norm over one rank's samples alone (SyncBatchNorm spans all)"
    instead = _instead(own, one, name, code, world, ranks[0])
    padded = _padded(own, one, names[:place], code)
    return what + (f": {instead}" if instead else "") + (f"; {padded}" if padded else "")


def _forward(case: ParityCase, layout: Layout, world: World, update: Update) -> _Forward:
    prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    batch = next(batches_for_updates(*data))[0]
    found = _Forward({}, {}, {}, range(batch.start, batch.start + batch.size), batch.total)
    hooks = [_watch(module, clean_name(name), found) for name, module in prepared.model.named_modules() if name]
    try:
        with torch.no_grad():
            prepared.predict(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _watch(module: nn.Module, name: str, found: _Forward) -> torch.utils.hooks.RemovableHandle:
    def hook(_: nn.Module, __: object, output: object) -> None:
        found.outputs.setdefault(name, []).extend(
            local_part(leaf) for leaf in leaves(output) if leaf.is_floating_point()
        )
        found.kinds[name] = type(module).__name__.removeprefix("FSDP")
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor) and not isinstance(bias, DTensor):
            found.biases[name] = bias.detach().clone()

    return module.register_forward_hook(hook)


def local_part(tensor: Tensor) -> Tensor | None:
    """The rank's own part; None of one that waits to be added up over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    return tensor.to_local().detach().clone()


def is_part(own: list[Tensor | None], expected: list[Tensor | None], rows: range, is_whole: bool = False) -> bool:
    """Whether each output is a part of what one device has for the same samples. What cannot be told is.

    is_whole  these are all samples, at all positions: a single number, a loss, is the same
    """
    for part, whole in zip(own, expected, strict=False):
        if part is None or whole is None or part.dim() != whole.dim() or not (part.dim() or is_whole):
            continue
        whole = _of_rows(part, whole, rows)
        if any(large % small for small, large in zip(part.shape, whole.shape, strict=True) if small):
            continue
        if not any(_is_near(part, one, whole) for _, one in _parts(whole, part.shape) if one.numel()):
            return False
    return True


def _of_rows(part: Tensor, whole: Tensor, rows: range) -> Tensor:
    if part.dim() and len(part) == len(rows) < len(whole):
        return whole[rows.start : rows.stop]
    return whole


def _is_near(part: Tensor, one: Tensor, whole: Tensor) -> bool:
    return float((part - one).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def _parts(whole: Tensor, shape: torch.Size) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """All parts of this shape that equal cuts along its dimensions give, and where each begins."""
    places = [range(0, large, small) if small else range(1) for small, large in zip(shape, whole.shape, strict=True)]
    for starts in itertools.product(*places):
        yield starts, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


# --- what it is instead


def _instead(own: _Forward, one: _Forward, name: str, code: OwnCode, world: World, rank: int) -> str:
    """What the first tensor of this output is, where one device has another; of `rank`. A collective."""
    part, whole = own.outputs[name][0], one.outputs[name][0]
    can_add = part is not None and whole is not None and part.shape == _of_rows(part, whole, own.rows).shape
    sizes = all_gather(torch.tensor([part.numel() if part is not None and can_add else -1]), world)
    text = ""
    if len({int(size) for size in sizes}) == 1 and part is not None and whole is not None and can_add:
        found = by_rank(part, _of_rows(part, whole, own.rows), code, world)
        if found.how:
            over = " x ".join(found.completes)
            why = "each rank has a part, and nothing adds them up" if found.how == "sum" else "nothing averages them"
            text = f"the {found.how} of the ranks' over {over} is that of one device: {why}"
    if not text and part is not None and whole is not None:
        text = _times(part, whole, own, one.biases.get(name), code) or _of_others(part, whole, own.rows)
    return str(broadcast_value(rank, text, world))


def _times(part: Tensor, whole: Tensor, own: _Forward, bias: Tensor | None, code: OwnCode) -> str:
    """Whether it is a multiple of what it should be, or has a multiple of the layer's bias too much."""
    expected = _of_rows(part, whole, own.rows)
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
        found = [next((at for at, one in _parts(whole, p.shape) if _is_near(p, one, whole)), None) for p in pieces]
        for number, at in enumerate(found):
            if at is not None and None not in found and (at[0], at[-1]) != (rows.start, number * size):
                there = f"features {at[-1]} to {at[-1] + size - 1} of samples {at[0]} to {at[0] + len(rows) - 1}"
                return (
                    f"its features {number * size} to {number * size + size - 1} are {there}, and the samples are "
                    f"{rows.start} to {rows.stop - 1}: gathered over another axis than it was split along"
                )
    return ""


def _padded(own: _Forward, one: _Forward, names: list[str], code: OwnCode) -> str:
    """A layer before that gives more features in parts than one device has: the padding may be counted."""
    for name in names:
        part, whole = own.outputs[name][0], one.outputs[name][0]
        if part is None or whole is None or not part.dim() or part.dim() != whole.dim():
            continue
        for axes in long_axes(code):
            wide, size = part.shape[-1] * math.prod(code.axes[axis] for axis in axes), whole.shape[-1]
            if size < wide < size + part.shape[-1] and size % part.shape[-1]:
                return (
                    f"{name} ({own.kinds[name]}) gives {wide} features in parts along {' x '.join(axes)}, and {size} "
                    "on one device: does what is padded count?"
                )
    return ""
