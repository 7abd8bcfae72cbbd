"""The first tensor that differs, and the likely cause: run again up to where the runs parted, keeping the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everyrank.data import Update
from everyrank.layout import Layout, find_own_code
from everyrank.parallel.expert import expert_pattern
from everyrank.parity.backward import gradients_by_rank
from everyrank.parity.case import ParityCase, Segments, single_like
from everyrank.parity.compare import Comparison, largest
from everyrank.parity.outputs import first_output_that_differs
from everyrank.parity.own_code import cause_in_gradients
from everyrank.parity.probes import probe_evaluation, probe_update
from everyrank.parity.reference import BY_NOISE, Reference, relative, tensor_distance
from everyrank.parity.rows import missing_rows
from everyrank.parity.trace import Trace, distance, trace, trace_in_place
from everyrank.world import World, from_rank_0, single_process_world
from everyrank.world.collectives import all_gather

__all__ = ["locate"]

_KEEP_BYTES = 2 << 30  # of states kept while looking
_State = dict[str, Tensor]
_FIRST_TENSOR = 1e-6  # of how far it moved: well beyond rounding at the first update that has it


@dataclass(frozen=True)
class _Evidence:
    """A run that differs, beside one of `single` over the same updates, and the samples that each rank computed on.

    Of own parallel code `output` says, where the loss differs, which module's output is the first that does, and
    `gradients`, where they differ, between which ranks, and what of them together is that of one device.
    """

    case: ParityCase
    layout: Layout
    world: World
    updates: Sequence[Update]
    reference: Trace
    run: Trace
    watched: Sequence[list[float]]
    output: str = ""
    gradients: str = ""


def locate(case: ParityCase, layout: Layout, world: World, key: str, finding: Comparison) -> tuple[str, str | None]:
    """("update 3, tensor layers.0.weight", the likely cause) of a finding. A collective."""
    single = single_like(case, layout, layout.precision, world.size)
    number, segments, done = _up_to(case, case.segments[str(single)], finding.update)
    if finding.kind == "single":  # the workload itself: no layout has to run for it
        update = segments[0][done - 1]
        probed = from_rank_0(world, f"{key}/probe", lambda: probe_update(case, single_process_world(world), update))
        return finding.what, probed or finding.cause
    if finding.cause is not None:
        return finding.what, finding.cause
    run = trace_in_place(case, layout, world, f"{key}/again", segments, keep=True)
    # of a layout of one process, rank 0 has all there is
    rows = [row.tolist() for row in _rows_of_all(run, world)] if layout.axis is not None else []

    stand_in = _stand_in(case, single, world, f"{key}/reference", segments)
    is_whole = case.reference is None  # one device can be asked
    is_loss_of_own_code = is_whole and layout.row.any_axes and finding.kind == "loss"
    output = first_output_that_differs(case, layout, world, segments[0][done - 1]) if is_loss_of_own_code else ""

    is_of_gradients = is_whole and layout.row.any_axes and case.by_gradient and finding.kind in ("replicas", "tensor")
    gradients = gradients_by_rank(case, layout, world, segments[0][0]) if is_of_gradients else ""

    def look() -> tuple[str, str | None]:
        assert run is not None
        reference = stand_in or trace(case, single, single_process_world(world), segments, keep=True)
        evidence = _Evidence(
            case, layout, world, segments[0], reference, run, rows or [_counted(run.rows)], output, gradients
        )
        if finding.kind == "evaluation":
            cause = probe_evaluation(case, single_process_world(world))
            return finding.what, cause or _about_rows(evidence, len(segments[0]), "evaluation") or _EVALUATION
        known = case.references.get(str(single))
        first = _first_difference(reference.states, run.states, known, number, run.not_compared)
        if finding.kind == "count" or first is None or first[0] > done:
            return finding.what, _cause_in_loss(evidence, done - 1)
        moved, name = first
        where = f"update {segments[0][moved - 1].step}" if moved else "before any update"
        kind = "gradient of" if layout.row.any_axes and case.by_gradient else "tensor"
        return f"{where}, {kind} {name}", _cause(evidence, moved, name)

    first, cause = from_rank_0(world, f"{key}/look", look)
    return first, cause


_EVALUATION = (
    "every rank evaluated the samples it should: the model computes something else in evaluation than in one process, "
    "or a metric is no sum over samples"
)


def _stand_in(case: ParityCase, single: Layout, world: World, key: str, segments: Segments) -> Trace | None:
    """The run of what stands in for `single`, with the rows of all its ranks; None where nothing does. A collective."""
    if case.reference is None:
        return None
    run = trace_in_place(case, single, world, key, segments, keep=True)
    if run is None or single.axis is None:
        return run
    of_ranks = [_rows_at(row.tolist()) for row in _rows_of_all(run, world)]
    rows = [torch.cat([torch.tensor(own, dtype=torch.float64) for own in each]) for each in zip(*of_ranks, strict=True)]
    return dataclasses.replace(run, rows=rows)


def _up_to(case: ParityCase, segments: Segments, index: int) -> tuple[int, Segments, int]:
    """Number, updates and length of the segment, up to update `index` (counted over all of them; -1: the last one)."""
    number = 0
    while len(segments[number]) <= index:
        index -= len(segments[number])
        number += 1
    number = number if index >= 0 else len(segments) - 1
    segment = segments[number]
    size = sum(parameter.numel() * parameter.element_size() for parameter in case.look().parameters())
    count = min((index if index >= 0 else len(segment) - 1) + 1, max(1, _KEEP_BYTES // (3 * size)))
    return number, [segment[:count]], count


def _counted(rows: Sequence[Tensor]) -> list[float]:
    """The rows in one list, each update's after how many they are."""
    return [value for row in rows for value in (float(len(row)), *row.tolist())]


def _rows_at(numbers: list[float]) -> list[list[float]]:
    """What `_counted` made one list of."""
    found: list[list[float]] = []
    while numbers:
        count = int(numbers[0])
        found.append(numbers[1 : 1 + count])
        numbers = numbers[1 + count :]
    return found


def _rows_of_all(run: Trace | None, world: World) -> list[Tensor]:
    assert run is not None
    return all_gather(torch.tensor(_counted(run.rows), dtype=torch.float64), world)


def _about_rows(evidence: _Evidence, place: int, what: str) -> str | None:
    """Samples that no rank computed on, or that several did; None where each one had its own."""
    expected = evidence.reference.rows
    found: list[float] = []
    for numbers in evidence.watched:
        start = 0
        for _ in range(place):
            start += int(numbers[start]) + 1 if start < len(numbers) else 0
        if start < len(numbers):
            found += numbers[start + 1 : start + 1 + int(numbers[start])]
    if place >= len(expected):
        return None
    missing = missing_rows(expected[place], torch.tensor(found, dtype=torch.float64))
    total = len(expected[place])
    if missing or len(found) != total:
        return (
            f"ranks do not read the samples they should: of the {total} samples of {what}, {missing} were read by no "
            f"rank, and {len(found)} were read in all"
        )
    return None


def _first_difference(
    reference: list[_State], run: list[_State], known: Reference | None, number: int, left_out: Sequence[str]
) -> tuple[int, str] | None:
    """(number of updates done, name) of the first tensor that differs by more than rounding."""
    for done, (here, there) in enumerate(zip(reference, run, strict=True)):
        for name, tensor in here.items():
            if name in left_out:
                continue
            nulls = known.nulls.get(name) if known is not None else None
            moved = distance(reference[0][name], tensor)
            floor = known.floors[number].get(name, 0.0) if known is not None else 0.0
            if moved and floor > BY_NOISE * moved:
                continue  # rounding alone moves it
            tolerance = max(_FIRST_TENSOR * moved, 1e-12 * largest(tensor), 10 * floor)
            if not (name in there and tensor_distance(tensor, there[name], nulls) <= tolerance):
                return done, name
    return None


def _cause(evidence: _Evidence, done: int, name: str) -> str:
    """The likely cause, from the tensor that differs first, after `done` updates."""
    if done == 0:
        return "the ranks did not start from the same weights: building the model draws on something unseeded"
    index, reference, run = done - 1, evidence.reference, evidence.run
    size = evidence.world.size - evidence.layout.servers
    if relative(reference.losses[index], run.losses[index]) > 1e-8:
        return _cause_in_loss(evidence, index)
    if not run.replicas_equal:
        what = "ranks hold different weights: gradients are not added up over the ranks"
        return f"{what}: {evidence.gradients}" if evidence.gradients else what
    if "running_" in name or "num_batches_tracked" in name:
        return "only batch norm differs: its statistics are not those of all ranks"
    if evidence.layout.row.any_axes and evidence.case.by_gradient:
        before, after = ((reference.states[place], run.states[place]) for place in (index, done))
        code, model = find_own_code(evidence.layout, size), evidence.case.look()
        return cause_in_gradients(before, after, code, model, evidence.gradients)
    of_experts = _about_experts(evidence, reference.states[index : done + 1], run.states[index : done + 1])
    if of_experts is not None:
        return of_experts
    ratio = _update_ratio(reference.states[index : done + 1], run.states[index : done + 1])
    if size > 1 and abs(ratio / size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device, as many as there are ranks: sum for mean"
    if size > 1 and abs(ratio * size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device: divided by the number of ranks once too often"
    if index and reference.counts[index] != reference.counts[index - 1]:
        return "it begins with an update of another size: gradients are not normalised by the global count"
    return (
        "the loss is that of one device, the gradients that reach the optimizer are not: they are no sum over all "
        "samples of the global batch"
    )


def _about_experts(evidence: _Evidence, reference: list[_State], run: list[_State]) -> str | None:
    """What is wrong with the update of experts, where nothing else differs; each run's states before and after it."""
    place = evidence.case.workload.experts
    degree = evidence.layout.mesh(evidence.world.size).get("expert", 1)
    if place is None or degree == 1:
        return None
    is_expert = {name: expert_pattern(place).fullmatch(name.rpartition(".")[0]) for name in reference[0]}
    for name in (name for name in reference[0] if not is_expert[name]):
        moved = distance(reference[0][name], reference[1][name])
        if distance(reference[1][name], run[1][name]) > _FIRST_TENSOR * moved:
            return None
    pairs = (
        [{name: state[name] for name in is_expert if is_expert[name]} for state in run] for run in (reference, run)
    )
    here, there = pairs
    ratio = _update_ratio(here, there)
    is_multiple = _distance_of_updates(here, there, ratio) < 0.3  # weight decay stays the same
    text = f"only experts differ, and their update is {ratio:.3g} times that of one device: "
    if is_multiple and abs(ratio / degree - 1) < 0.05:
        return f"{text}a sum over the {degree} ranks of the expert axis, which is to be divided by their number"
    if is_multiple and abs(ratio * degree - 1) < 0.05:
        return f"{text}divided by the {degree} ranks of the expert axis once too often"
    return (
        f"{text}their gradients are not those of the tokens that chose them, or were averaged over the expert axis, "
        "whose ranks hold other experts"
    )


def _cause_in_loss(evidence: _Evidence, index: int) -> str:
    """The likely cause of a loss, or a count of its terms, that differs before any weight does."""
    place = min(index, len(evidence.updates) - 1)
    update, reference, run = evidence.updates[place], evidence.reference, evidence.run
    found = probe_update(evidence.case, single_process_world(evidence.world), update)
    if found is not None:
        return found
    about_rows = _about_rows(evidence, place, f"update {update.step}")
    if about_rows is not None and _begins_second_epoch(evidence.updates, place):
        why = "it begins with the second epoch: the epoch does not reach the order of the samples (set_epoch)"
        return f"{why}; {about_rows}"
    if about_rows is not None:
        return about_rows
    if relative(reference.counts[index], run.counts[index]) > 1e-6:
        there, here = run.counts[index], reference.counts[index]
        return f"every rank read its samples, but {there:g} loss terms were counted and {here:g} in one process"
    if evidence.output:
        return f"every rank read the samples it should, and the loss differs before the weights do: {evidence.output}"
    norm = "batch norm over one rank's samples only, or " if evidence.case.has_batch_norm else ""
    return (
        f"every rank read the samples it should, and the loss differs before the weights do: {norm}a model that "
        "computes something else in parts than as a whole"
    )


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


def _distance_of_updates(reference: list[_State], run: list[_State], ratio: float) -> float:
    """How far the update of `run` is from `ratio` times that of `reference`, as a part of its own norm."""
    far = square = 0.0
    for name, before in reference[0].items():
        own, other = (reference[1][name] - before).double(), (run[1][name] - run[0][name]).double()
        far += float((other - ratio * own).square().sum())
        square += float(other.square().sum())
    return (far / square) ** 0.5 if square else 0.0
