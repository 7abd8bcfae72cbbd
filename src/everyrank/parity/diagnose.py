"""The first tensor that differs, and the likely cause: run again up to where the runs parted, keeping the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from everyrank.data import Update
from everyrank.layout import Layout, find_own_code
from everyrank.layout.options import BuildOptions
from everyrank.parallel.expert import expert_pattern
from everyrank.parallel.init_model import shared_parameters
from everyrank.parity.async_reads import read_before_wait
from everyrank.parity.backward import gradients_by_rank
from everyrank.parity.case import ParityCase, Segments, single_like
from everyrank.parity.compare import Comparison, largest
from everyrank.parity.initial_state import StateChanges, changes_by_parallelize, listed
from everyrank.parity.outputs import first_output_that_differs
from everyrank.parity.own_code import cause_in_gradients
from everyrank.parity.probes import probe_evaluation, probe_update
from everyrank.parity.reference import BY_NOISE, Reference, relative, tensor_distance
from everyrank.parity.rows import missing_rows
from everyrank.parity.trace import Trace, distance, trace, trace_in_place
from everyrank.world import World, from_rank_0, single_process_world
from everyrank.world.collectives import all_gather

__all__ = ["GRADIENTS_DIFFER", "locate"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_KEEP_BYTES = 2 << 30  # of states kept while looking
_State = dict[str, Tensor]
GRADIENTS_DIFFER = (
    "the loss is that of one device, the gradients that reach the optimizer are not: they are no sum over all "
    "samples of the global batch"
)
"""The cause where nothing more specific was found. The gradients themselves were not compared."""
_FIRST_TENSOR = 1e-6  # of how far it moved: well beyond rounding at the first update that has it


@dataclass(frozen=True)
class _Evidence:
    """A run that differs, beside one of `single` over the same updates, and the samples that each rank computed on.

    Of own parallel code `output` says, where the loss differs, which module's output is the first that does, and
    `gradients`, where they differ, between which ranks, and what of them together is that of one device, and `state`
    what `parallelize` has changed before the first update.
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
    state: StateChanges = field(default_factory=lambda: StateChanges(""))


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
    early = read_before_wait(case, layout, world, segments[0][done - 1])
    if early:
        return finding.what.replace("tensor ", "gradient of " if case.by_gradient else "values of "), early
    run = trace_in_place(case, layout, world, f"{key}/again", segments, keep=True)
    # of a layout of one process, rank 0 has all there is
    rows = [row.tolist() for row in _rows_of_all(run, world)] if layout.axis is not None else []

    stand_in = _stand_in(case, single, world, f"{key}/reference", segments)
    is_whole = case.reference is None  # one device can be asked
    state = None
    if is_whole and layout.row.any_axes and not layout.read(BuildOptions).meta:
        state = changes_by_parallelize(case, layout, world)
    is_loss_of_own_code = is_whole and layout.row.any_axes and finding.kind == "loss"
    output = first_output_that_differs(case, layout, world, segments[0][done - 1]) if is_loss_of_own_code else ""

    is_of_gradients = is_whole and layout.row.any_axes and case.by_gradient and finding.kind in ("replicas", "tensor")
    gradients = gradients_by_rank(case, layout, world, segments[0][0]) if is_of_gradients else ""

    def look() -> tuple[str, str | None]:
        assert run is not None
        reference = stand_in or trace(case, single, single_process_world(world), segments, keep=True)
        all_rows = rows or [_counted(run.rows)]
        evidence = _Evidence(
            case, layout, world, segments[0], reference, run, all_rows, output, gradients, state or StateChanges("")
        )
        return _look(evidence, finding, case.references.get(str(single)), number, done)

    first, cause = from_rank_0(world, f"{key}/look", look)
    return first, cause


def _look(
    evidence: _Evidence, finding: Comparison, known: Reference | None, number: int, done: int
) -> tuple[str, str | None]:
    """What differs first, and the likely cause; on rank 0."""
    case, run, updates = evidence.case, evidence.run, evidence.updates
    if finding.kind == "evaluation":
        cause = probe_evaluation(case, single_process_world(evidence.world))
        return finding.what, cause or _about_rows(evidence, len(updates), "evaluation") or _EVALUATION
    about_weights = evidence.state.of_weights()
    if about_weights:
        return f"before any update, {next(iter({**evidence.state.weights, **evidence.state.copies}))}", about_weights
    first = _first_difference(evidence.reference.states, run.states, known, number, run.not_compared)
    if finding.kind == "count" or first is None or first[0] > done:
        return finding.what, _with_others(evidence, _cause_in_loss(evidence, done - 1))
    moved, names = first
    where = f"update {updates[moved - 1].step}" if moved else "before any update"
    kind = "gradient of " if moved and evidence.layout.row.any_axes and case.by_gradient else "tensor "
    name = _name_of(evidence, names)
    about_training = evidence.state.of_training(names)
    if about_training:
        return f"{where}, {kind}{name}", about_training
    return f"{where}, {kind}{name}", _with_others(evidence, _cause(evidence, moved, names))


def _name_of(evidence: _Evidence, names: Sequence[str]) -> str:
    """The tensor to name of those that differ: one with another requires_grad, or the first.

    Gradients go wrong from the last layer to the first. Where not all of them differ, the last one that does is
    nearest to the mistake.
    """
    changed = [name for name in names if name in (*evidence.state.frozen, *evidence.state.unfrozen)]
    is_of_gradients = evidence.layout.row.any_axes and evidence.case.by_gradient
    compared = [name for name in evidence.reference.states[0] if name not in evidence.run.not_compared]
    if changed or not is_of_gradients or len(names) >= len(compared):
        return next(iter(changed), names[0])
    tied = {f"{module}.{name}".lstrip(".") for one in shared_parameters(evidence.case.look()) for module, name in one}
    return next((name for name in reversed(names) if name not in tied), names[0])


def _with_others(evidence: _Evidence, cause: str) -> str:
    """The cause, and what else `parallelize` has changed: dtypes and buffers."""
    others = evidence.state.of_others()
    return f"{cause}; {others}" if others else cause


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
) -> tuple[int, list[str]] | None:
    """(number of updates done, names) of the first tensors that differ by more than rounding."""
    for done, (here, there) in enumerate(zip(reference, run, strict=True)):
        names: list[str] = []
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
                names.append(name)
        if names:
            return done, names
    return None


def _cause(evidence: _Evidence, done: int, names: Sequence[str]) -> str:
    """The likely cause, from the tensors that differ first, after `done` updates."""
    if done == 0:
        return "the ranks did not start from the same weights: building the model draws on something unseeded"
    index, reference, run = done - 1, evidence.reference, evidence.run
    size = evidence.world.size - evidence.layout.servers
    if relative(reference.losses[index], run.losses[index]) > 1e-8:
        return _cause_in_loss(evidence, index)
    about_buffers = _about_buffers(evidence, names)
    if about_buffers is not None:
        return about_buffers
    if not run.replicas_equal:
        what = "ranks hold different weights: gradients are not added up over the ranks"
        return f"{what}: {evidence.gradients}" if evidence.gradients else what
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
    return GRADIENTS_DIFFER


def _about_buffers(evidence: _Evidence, names: Sequence[str]) -> str | None:
    """Why buffers differ, where no parameter does yet; None where one does."""
    model = evidence.case.look()
    buffers = {name: module for module, name in _buffers(model)}
    if not names or not all(name in buffers for name in names):
        return None
    if all(name.rpartition(".")[2] in _STATISTICS for name in names):
        return "only batch norm differs: its statistics are not those of all ranks"
    name, kind = names[0], type(buffers[names[0]]).__name__
    return (
        f"the parameters are those of one device, and buffers are not ({listed(names)}): {kind} writes {name} in "
        "forward, from the samples of one rank only; all-reduce what it is computed from, over all ranks"
    )


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            yield module, f"{path}.{name}".lstrip(".")


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
