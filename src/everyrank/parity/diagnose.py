"""The first tensor that differs, and the likely cause: run again up to where the losses parted, keeping the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everyrank.data import Update
from everyrank.layout import Layout
from everyrank.parallel.construct import on_cpu
from everyrank.parity.compare import Finding, relative, tensor_difference, tensor_tolerance
from everyrank.parity.trace import Subject, Trace, single_like, trace, trace_in_place
from everyrank.world import World, alone, from_rank_0

__all__ = ["locate"]

_KEEP_BYTES = 2 << 30  # of states kept while looking
_State = dict[str, Tensor]


def locate(subject: Subject, layout: Layout, world: World, key: str, finding: Finding) -> tuple[str, str | None]:
    """("update 3, tensor layers.0.weight", the likely cause) of a finding. A collective."""
    if finding.cause is not None or finding.update < 0:
        return finding.what, finding.cause
    size = sum(parameter.numel() * parameter.element_size() for parameter in on_cpu(subject.workload).parameters())
    count = min(finding.update + 1, max(1, _KEEP_BYTES // (3 * size)))
    options: dict[str, Any] = {"updates": subject.updates[:count], "keep": count}
    run = trace_in_place(subject, layout, world, f"{key}/again", **options)

    def look() -> tuple[str, str | None]:
        assert run is not None
        single = single_like(subject, layout)
        reference = trace(subject, single, alone(world), **options)
        reverse = trace(subject, single, alone(world), reverse=True, **options)
        first = _first_difference(reference.states, reverse.states, run.states, layout.precision)
        if first is None:
            return finding.what, None
        done, name = first
        where = f"update {done - 1}" if done else "before any update"
        return f"{where}, tensor {name}", _cause(subject, reference, run, done, name, world.size)

    first, cause = from_rank_0(world, f"{key}/look", look)
    return first, cause


def _first_difference(
    reference: list[_State], reverse: list[_State], run: list[_State], precision: str
) -> tuple[int, str] | None:
    """(number of updates done, name) of the first tensor beyond its tolerance."""
    for done, (here, floor, there) in enumerate(zip(reference, reverse, run, strict=True)):
        for name, tensor in here.items():
            tolerance = tensor_tolerance(tensor, [floor[name]], precision)
            if not tensor_difference(tensor, there.get(name)) <= tolerance:
                return done, name
    return None


def _cause(subject: Subject, reference: Trace, run: Trace, done: int, name: str, size: int) -> str:
    """The likely cause, from what differs first."""
    if done == 0:
        return "the ranks did not start from the same weights: building the model draws on something unseeded"
    index, updates = done - 1, subject.updates
    if relative(reference.losses[index], run.losses[index]) > 1e-8:
        if _begins_second_epoch(updates, index):
            return "it begins with the second epoch: the epoch does not reach the order of the samples (set_epoch)"
        norm = "batch norm over one rank's samples only, or " if subject.has_batch_norm else ""
        return (
            f"the loss differs before the weights do: {norm}ranks that do not read the samples they should, or a model "
            "that computes something else in parts than as a whole"
        )
    if not run.replicas_equal:
        return "ranks hold different weights: gradients are not added up over the ranks"
    if "running_" in name or "num_batches_tracked" in name:
        return "only batch norm differs: its statistics are not those of all ranks"
    ratio = _update_ratio(reference.states[index : done + 1], run.states[index : done + 1])
    if size > 1 and abs(ratio / size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device, as many as there are ranks: sum for mean"
    if size > 1 and abs(ratio * size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device: divided by the number of ranks once too often"
    if index and reference.counts[index] != reference.counts[index - 1]:
        return "it begins with an update of another size: gradients are not normalised by the global count"
    return "the gradients that reach the optimizer are not the sum over all samples of the global batch"


def _begins_second_epoch(updates: Sequence[Update], index: int) -> bool:
    return index > 0 and updates[index].epoch > 0 and updates[index - 1].epoch == 0


def _update_ratio(reference: list[_State], run: list[_State]) -> float:
    """How many times larger the update of `run` is, by least squares over all floating-point tensors."""
    product = square = 0.0
    for name, before in reference[0].items():
        if before.is_floating_point() and "running_" not in name:
            own = (reference[1][name] - before).double()
            other = (run[1][name] - run[0][name]).double()
            product += float((own * other).sum())
            square += float((own * own).sum())
    return product / square if square else 1.0
