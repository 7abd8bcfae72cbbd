"""The first module whose output is not what it is on one device: for a loss that differs before any weight does.

Each rank runs one forward pass of its own part, and one of the whole batch in one process, from the weights as they are
built. What it has of an output may be some of the samples, of the positions or of the features: a part of the whole is
looked for.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.data import Update, batches_for_updates
from everyrank.layout import Layout
from everyrank.parallel.own import clean_name
from everyrank.parity.case import ParityCase
from everyrank.parity.rows import leaves
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from everyrank.world.collectives import all_gather

__all__ = ["first_output_that_differs"]

_ROUNDING = 1e-9  # of the largest number in an output, float64
_Outputs = dict[str, list[Tensor | None]]


def first_output_that_differs(case: ParityCase, layout: Layout, world: World, update: Update) -> str:
    """`blocks.0.norm (BatchNorm1d)`, the first in the order in which they are done; "" where none is. A collective."""
    own, rows, kinds = _outputs(case, layout, world, update)
    expected, _, _ = _outputs(case, Layout("single", precision="float64"), single_process_world(world), update)
    names = [name for name in own if name in expected]
    differs = [name for name in names if rows and not _is_part(own[name], expected[name], rows)]
    first = names.index(differs[0]) if differs else len(names)
    of_ranks = [int(found) for found in all_gather(torch.tensor([first]), world)]
    place = min(of_ranks)
    if place == len(names):
        return ""
    ranks = ", ".join(str(rank) for rank, found in enumerate(of_ranks) if found == place)
    what = f"the first output that differs is that of {names[place]} ({kinds[names[place]]}), on rank {ranks}"
    if "BatchNorm" in kinds[names[place]]:
        what += ": batch norm over one rank's samples alone (SyncBatchNorm spans all)"
    return what


def _outputs(case: ParityCase, layout: Layout, world: World, update: Update) -> tuple[_Outputs, range, dict[str, str]]:
    """What each module gives for this rank's part of an update, which rows of the batch that is, and their types."""
    prepared = prepare(case.workload, layout, world)
    data = (case.workload, case.train_data, [update], prepared.data_slice, 1, prepared.world, torch.float64)
    batch = next(batches_for_updates(*data))[0]
    found: _Outputs = {}
    kinds: dict[str, str] = {}
    hooks = [_watch(module, clean_name(name), found, kinds) for name, module in prepared.model.named_modules() if name]
    try:
        with torch.no_grad():
            prepared.predict(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found, range(batch.start, batch.start + batch.size), kinds


def _watch(module: nn.Module, name: str, found: _Outputs, kinds: dict[str, str]) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        found.setdefault(name, []).extend(_local(leaf) for leaf in leaves(output) if leaf.is_floating_point())
        kinds[name] = type(module).__name__.removeprefix("FSDP")

    return module.register_forward_hook(hook)


def _local(tensor: Tensor) -> Tensor | None:
    """The rank's own part; None of one that waits to be added up over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    return tensor.to_local().detach().clone()


def _is_part(own: list[Tensor | None], expected: list[Tensor | None], rows: range) -> bool:
    """Whether each output is a part of what one device has for the same samples. What cannot be told is."""
    for part, whole in zip(own, expected, strict=False):
        if part is None or whole is None or part.dim() != whole.dim() or not part.dim():
            continue
        if len(part) == len(rows) < len(whole):
            whole = whole[rows.start : rows.stop]
        if any(large % small for small, large in zip(part.shape, whole.shape, strict=True) if small):
            continue
        allowed = _ROUNDING * max(float(whole.abs().max()), 1e-300) if whole.numel() else 0.0
        if not any(float((part - one).abs().max()) <= allowed for one in _parts(whole, part.shape) if one.numel()):
            return False
    return True


def _parts(whole: Tensor, shape: torch.Size) -> Any:
    """All parts of this shape that equal cuts along its dimensions give."""
    places = [range(0, large, small) if small else range(1) for small, large in zip(shape, whole.shape, strict=True)]
    for starts in itertools.product(*places):
        yield whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]
