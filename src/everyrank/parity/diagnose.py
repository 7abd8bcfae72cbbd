"""Find the first tensor that differs and the likely cause: run again up to the divergence and keep all tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from everyrank.data import Update
from everyrank.layout import Layout, find_custom_parallelize
from everyrank.layout.options import BuildOptions
from everyrank.parallel.expert import expert_pattern
from everyrank.parallel.init_model import shared_parameters
from everyrank.parity.async_reads import read_before_wait
from everyrank.parity.backward import gradients_by_rank
from everyrank.parity.case import ParityCase, Segments, single_like
from everyrank.parity.compare import Comparison, largest
from everyrank.parity.custom_gradients import cause_in_gradients
from everyrank.parity.initial_state import StateChanges, changes_by_parallelize, name_list
from everyrank.parity.outputs import first_output_that_differs
from everyrank.parity.probes import probe_evaluation, probe_update
from everyrank.parity.reference import NOISE_FRACTION, Reference, relative, tensor_distance
from everyrank.parity.rows import count_missing_rows
from everyrank.parity.trace import Trace, distance, finite_change, trace, trace_on_its_ranks
from everyrank.world import World, from_rank_0, single_process_world
from everyrank.world.collectives import all_gather

__all__ = ["GRADIENTS_DIFFER", "locate"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_KEEP_BYTES = 2 << 30  # of the states that a run keeps
_State = dict[str, Tensor]
GRADIENTS_DIFFER = (
    "the loss equals that of one device, but the gradients at the optimizer step do not: they are not the sum over "
    "all samples of the global batch"
)
"""The cause where nothing more specific was found. The gradients themselves were not compared."""
_UNEQUAL_STEPS = (
    "they do not step with the same gradients (not summed over the ranks, or scaled by the count of one rank), or some "
    "do not receive the updated weights"
)
_FIRST_TENSOR = 1e-6  # difference relative to the update: well above rounding in the first update that differs
_SMALLEST_DIFFERENCE = 1e-7  # relative to the distance moved: the tolerance of the comparison


@dataclass(frozen=True)
class _Evidence:
    """A run that differs, `single` over the same updates, and the samples that each rank computed on.

    For a custom parallelize function, `output` describes the first module whose output differs, `gradients` the axes
    along which gradients differ, and `state` what the function changed before the first update.
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
    loss_scale: float = 0.0


def locate(case: ParityCase, layout: Layout, world: World, key: str, comparison: Comparison) -> tuple[str, str | None]:
    """Return the location of a divergence, such as "update 3, tensor layers.0.weight", and its likely cause. A
    collective.
    """
    single = single_like(case, layout, layout.precision, world.size)
    number, segments, num_updates = _truncate(case, case.segments[str(single)], comparison.update)
    if comparison.category == "single":  # the workload itself is not a sum over samples, so no layout has to run
        update = segments[0][num_updates - 1]
        probed = from_rank_0(world, f"{key}/probe", lambda: probe_update(case, single_process_world(world), update))
        return comparison.location, probed or comparison.cause
    if comparison.cause is not None:
        return comparison.location, comparison.cause
    early_read = read_before_wait(case, layout, world, segments[0][num_updates - 1])
    if early_read:
        return comparison.location.replace(
            "tensor ", "gradient of " if case.compares_gradients else "values of "
        ), early_read
    run = trace_on_its_ranks(case, layout, world, f"{key}/again", segments, keep=True)
    # a layout of one process has its rows on rank 0
    rows = [row.tolist() for row in _gather_rows(run, world)] if layout.axis is not None else []

    reference_run = _run_reference(case, single, world, f"{key}/reference", segments)
    fits_on_one_device = case.reference is None
    state = None
    if fits_on_one_device and layout.row.any_axes and not layout.read(BuildOptions).meta:
        state = changes_by_parallelize(case, layout, world)
    is_loss_of_custom_function = fits_on_one_device and layout.row.any_axes and comparison.category == "loss"
    output = (
        first_output_that_differs(case, layout, world, segments[0][num_updates - 1])
        if is_loss_of_custom_function
        else ""
    )

    is_of_gradients = (
        fits_on_one_device
        and layout.row.any_axes
        and case.compares_gradients
        and comparison.category in ("replicas", "tensor")
    )
    gradients = gradients_by_rank(case, layout, world, segments[0][0]) if is_of_gradients else ""

    def diagnose() -> tuple[str, str | None]:
        assert run is not None
        reference = reference_run or trace(case, single, single_process_world(world), segments, keep=True)
        all_rows = rows or [_flatten_rows(run.rows)]
        noise = case.references.get(str(single))
        evidence = _Evidence(
            case,
            layout,
            world,
            segments[0],
            reference,
            run,
            all_rows,
            output,
            gradients,
            state or StateChanges(""),
            noise.loss_scale if noise is not None else 0.0,
        )
        return _diagnose(evidence, comparison, noise, number, num_updates)

    first, cause = from_rank_0(world, f"{key}/diagnose", diagnose)
    return first, cause


def _diagnose(
    evidence: _Evidence, comparison: Comparison, noise: Reference | None, number: int, done: int
) -> tuple[str, str | None]:
    """Return the first divergence and the likely cause, on rank 0."""
    case, run, updates = evidence.case, evidence.run, evidence.updates
    if comparison.category == "evaluation":
        cause = probe_evaluation(case, single_process_world(evidence.world))
        return comparison.location, cause or _sample_cause(evidence, len(updates), "evaluation") or _EVALUATION_DIFFERS
    weight_cause = evidence.state.weight_cause()
    if weight_cause:
        return f"before any update, {next(iter({**evidence.state.weights, **evidence.state.copies}))}", weight_cause
    states = evidence.reference.states, run.states
    first = _first_difference(*states, noise, number, run.not_compared)
    if first is None and comparison.category == "tensor":
        first = _first_difference(*states, noise, number, run.not_compared, _SMALLEST_DIFFERENCE)
    if first is None and comparison.category in ("replicas", "tensor"):
        cause = _replica_cause(evidence) if comparison.category == "replicas" else GRADIENTS_DIFFER
        return comparison.location, _with_state_changes(evidence, cause)
    # the loss of an update is computed before its tensors change
    is_loss = comparison.category == "loss" and first is not None and first[0] == done and _loss_differs(evidence, done)
    if comparison.category == "count" or first is None or first[0] > done or is_loss:
        return comparison.location, _with_state_changes(evidence, _loss_cause(evidence, done - 1))
    num_updates, names = first
    when = f"update {updates[num_updates - 1].step}" if num_updates else "before any update"
    kind = "gradient of " if num_updates and evidence.layout.row.any_axes and case.compares_gradients else "tensor "
    name = _tensor_to_report(evidence, names)
    requires_grad_cause = evidence.state.requires_grad_cause(names)
    if requires_grad_cause:
        return f"{when}, {kind}{name}", requires_grad_cause
    if not num_updates and all(name in evidence.state.buffers for name in names):
        return f"{when}, {kind}{name}", evidence.state.dtype_and_buffer_cause()
    return f"{when}, {kind}{name}", _with_state_changes(evidence, _tensor_cause(evidence, num_updates, names))


def _tensor_to_report(evidence: _Evidence, names: Sequence[str]) -> str:
    """Choose the tensor to report: one whose requires_grad was changed, or the first.

    The backward pass goes from the last layer to the first. If only some gradients differ, the last of them is nearest
    to the mistake.
    """
    changed = [name for name in names if name in (*evidence.state.frozen, *evidence.state.unfrozen)]
    is_of_gradients = evidence.layout.row.any_axes and evidence.case.compares_gradients
    compared = [name for name in evidence.reference.states[0] if name not in evidence.run.not_compared]
    if changed or not is_of_gradients or len(names) >= len(compared):
        return next(iter(changed), names[0])
    tied = {
        f"{module}.{name}".lstrip(".")
        for names_of_tensor in shared_parameters(evidence.case.build_for_inspection())
        for module, name in names_of_tensor
    }
    return next((name for name in reversed(names) if name not in tied), names[0])


def _with_state_changes(evidence: _Evidence, cause: str) -> str:
    """Append other changes by `parallelize` to the cause: dtypes and buffers."""
    others = evidence.state.dtype_and_buffer_cause()
    return f"{cause}; {others}" if others else cause


_EVALUATION_DIFFERS = (
    "every rank evaluated the right samples, but the model computes something different in evaluation than in one "
    "process, or a metric is not a sum over samples"
)


def _run_reference(case: ParityCase, single: Layout, world: World, key: str, segments: Segments) -> Trace | None:
    """Run the layout that substitutes `single`, with the rows of all its ranks; None without one. A collective."""
    if case.reference is None:
        return None
    run = trace_on_its_ranks(case, single, world, key, segments, keep=True)
    if run is None or single.axis is None:
        return run
    rows_by_rank = [_unflatten_rows(row.tolist()) for row in _gather_rows(run, world)]
    rows = [
        torch.cat([torch.tensor(local_rows, dtype=torch.float64) for local_rows in rows_of_update])
        for rows_of_update in zip(*rows_by_rank, strict=True)
    ]
    return dataclasses.replace(run, rows=rows)


def _truncate(case: ParityCase, segments: Segments, index: int) -> tuple[int, Segments, int]:
    """Return number, updates and length of the segment up to update `index` (counted over all; -1: the last)."""
    segment_index = 0
    while len(segments[segment_index]) <= index:
        index -= len(segments[segment_index])
        segment_index += 1
    segment_index = segment_index if index >= 0 else len(segments) - 1
    segment = segments[segment_index]
    size = sum(parameter.numel() * parameter.element_size() for parameter in case.build_for_inspection().parameters())
    count = min((index if index >= 0 else len(segment) - 1) + 1, max(1, _KEEP_BYTES // (3 * size)))
    return segment_index, [segment[:count]], count


def _flatten_rows(rows: Sequence[Tensor]) -> list[float]:
    """Flatten the rows into one list, with the length of each update's rows before them."""
    return [value for row in rows for value in (float(len(row)), *row.tolist())]


def _unflatten_rows(numbers: list[float]) -> list[list[float]]:
    """Split the list that `_flatten_rows` made."""
    rows: list[list[float]] = []
    while numbers:
        count = int(numbers[0])
        rows.append(numbers[1 : 1 + count])
        numbers = numbers[1 + count :]
    return rows


def _gather_rows(run: Trace | None, world: World) -> list[Tensor]:
    assert run is not None
    return all_gather(torch.tensor(_flatten_rows(run.rows), dtype=torch.float64), world)


def _sample_cause(evidence: _Evidence, index: int, subject: str) -> str | None:
    """Return a message about samples that no rank or several ranks computed on, or None."""
    expected = evidence.reference.rows
    rows: list[float] = []
    for numbers in evidence.watched:
        start = 0
        for _ in range(index):
            start += int(numbers[start]) + 1 if start < len(numbers) else 0
        if start < len(numbers):
            rows += numbers[start + 1 : start + 1 + int(numbers[start])]
    if index >= len(expected):
        return None
    missing = count_missing_rows(expected[index], torch.tensor(rows, dtype=torch.float64))
    total = len(expected[index])
    if missing or len(rows) != total:
        return (
            f"the ranks read the wrong samples: of the {total} samples of {subject}, {missing} were read by no rank, "
            f"and {len(rows)} were read in total"
        )
    return None


def _first_difference(
    reference: list[_State],
    run: list[_State],
    noise: Reference | None,
    number: int,
    not_compared: Sequence[str],
    smallest: float = _FIRST_TENSOR,
) -> tuple[int, list[str]] | None:
    """Return (number of updates done, names) of the first tensors that differ by more than rounding, or None.

    `smallest` is the smallest difference that counts, relative to the distance that the tensor has moved.
    """
    for num_updates, (expected_state, state) in enumerate(zip(reference, run, strict=True)):
        names: list[str] = []
        for name, tensor in expected_state.items():
            if name in not_compared:
                continue
            zero_gradient_masks = noise.zero_gradient_masks.get(name) if noise is not None else None
            moved = finite_change(reference[0].get(name), tensor)
            floor = noise.floors[number].get(name, 0.0) if noise is not None else 0.0
            if moved and floor > NOISE_FRACTION * moved:
                continue  # rounding alone moves it
            tolerance = max(smallest * moved, 1e-12 * largest(tensor), 10 * floor)
            if not (name in state and tensor_distance(tensor, state[name], zero_gradient_masks) <= tolerance):
                names.append(name)
        if names:
            return num_updates, names
    return None


def _tensor_cause(evidence: _Evidence, num_updates: int, names: Sequence[str]) -> str:
    """Return the likely cause, given the tensors that differ first after `done` updates."""
    if num_updates == 0:
        return "the ranks did not start from the same weights: the model is built from random numbers without a seed"
    index, reference, run = num_updates - 1, evidence.reference, evidence.run
    size = evidence.world.size - evidence.layout.servers
    if _loss_differs(evidence, num_updates):
        return _loss_cause(evidence, index)
    buffer_cause = _buffer_cause(evidence, names)
    if buffer_cause is not None:
        return buffer_cause
    if not run.replicas_equal:
        return _replica_cause(evidence)
    if evidence.layout.row.any_axes and evidence.case.compares_gradients:
        before, after = ((reference.states[number], run.states[number]) for number in (index, num_updates))
        code, model = find_custom_parallelize(evidence.layout, size), evidence.case.build_for_inspection()
        return cause_in_gradients(before, after, code, model, evidence.gradients)
    expert_cause = _expert_cause(
        evidence, reference.states[index : num_updates + 1], run.states[index : num_updates + 1]
    )
    if expert_cause is not None:
        return expert_cause
    ratio = _update_ratio(reference.states[index : num_updates + 1], run.states[index : num_updates + 1])
    if size > 1 and abs(ratio / size - 1) < 0.05:
        ratio_text = f"the update is {ratio:.3g} times that of one device, the number of ranks"
        return f"{ratio_text}: gradients are summed, not averaged"
    if size > 1 and abs(ratio * size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device: gradients are divided by the ranks once too often"
    if index and reference.counts[index] != reference.counts[index - 1]:
        return (
            "the difference begins at an update with a different number of loss terms: gradients are not normalised by "
            "the global count"
        )
    return GRADIENTS_DIFFER


def _replica_cause(evidence: _Evidence) -> str:
    """Return the likely cause of replicas that differ between the ranks."""
    names = evidence.run.unequal_replicas
    buffers = {name: module for module, name in _buffers(evidence.case.build_for_inspection())}
    if not names or not all(name in buffers for name in names):
        return f"the ranks have different weights: {evidence.gradients or _UNEQUAL_STEPS}"
    return (
        f"the parameters are equal on all ranks, but buffers are not ({name_list(names)}): "
        f"{type(buffers[names[0]]).__name__} writes {names[0]} in forward, from values of one rank only; all-reduce "
        "the values that it is computed from"
    )


def _loss_differs(evidence: _Evidence, num_updates: int) -> bool:
    """Whether the loss of the last of the first `num_updates` updates differs by more than rounding."""
    expected_loss, loss = (run.losses[num_updates - 1] for run in (evidence.reference, evidence.run))
    return relative(expected_loss, loss, evidence.loss_scale) > 1e-8


def _buffer_cause(evidence: _Evidence, names: Sequence[str]) -> str | None:
    """Return the cause if only buffers differ and no parameter does, else None."""
    model = evidence.case.build_for_inspection()
    buffers = {name: module for module, name in _buffers(model)}
    if not names or not all(name in buffers for name in names):
        return None
    if all(name.rpartition(".")[2] in _STATISTICS for name in names):
        return "only batch norm differs: its statistics are not computed over all ranks"
    name, kind = names[0], type(buffers[names[0]]).__name__
    return (
        f"the parameters equal those of one device, but buffers do not ({name_list(names)}): {kind} writes {name} in "
        "forward, from the samples of one rank only; all-reduce the values that it is computed from"
    )


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            yield module, f"{path}.{name}".lstrip(".")


def _expert_cause(evidence: _Evidence, reference: list[_State], run: list[_State]) -> str | None:
    """Return the cause if only experts differ, else None; each run's states before and after the update."""
    experts_pattern = evidence.case.workload.experts
    degree = evidence.layout.mesh(evidence.world.size).get("expert", 1)
    if experts_pattern is None or degree == 1:
        return None
    is_expert = {name: expert_pattern(experts_pattern).fullmatch(name.rpartition(".")[0]) for name in reference[0]}
    for name in (name for name in reference[0] if not is_expert[name]):
        moved = distance(reference[0][name], reference[1][name])
        if distance(reference[1][name], run[1][name]) > _FIRST_TENSOR * moved:
            return None
    pairs = (
        [{name: state[name] for name in is_expert if is_expert[name]} for state in run] for run in (reference, run)
    )
    expected_states, states = pairs
    ratio = _update_ratio(expected_states, states)
    is_multiple = _distance_of_updates(expected_states, states, ratio) < 0.3  # weight decay stays the same
    text = f"only the experts differ, and their update is {ratio:.3g} times that of one device: "
    if is_multiple and abs(ratio / degree - 1) < 0.05:
        return f"{text}it is summed over the {degree} ranks of the expert axis, and not divided by their number"
    if is_multiple and abs(ratio * degree - 1) < 0.05:
        return f"{text}it is divided by the {degree} ranks of the expert axis once too often"
    return (
        f"{text}their gradients do not come from the tokens that chose them, or are averaged over the expert axis, "
        "whose ranks hold other experts"
    )


def _loss_cause(evidence: _Evidence, index: int) -> str:
    """Return the likely cause of a loss or count that differs before any weight does."""
    position = min(index, len(evidence.updates) - 1)
    update, reference, run = evidence.updates[position], evidence.reference, evidence.run
    cause = probe_update(evidence.case, single_process_world(evidence.world), update)
    if cause is not None:
        return cause
    sample_cause = _sample_cause(evidence, position, f"update {update.step}")
    if sample_cause is not None and _begins_second_epoch(evidence.updates, position):
        epoch_cause = (
            "the difference begins in the second epoch: the epoch number does not reach the sampler (set_epoch)"
        )
        return f"{epoch_cause}; {sample_cause}"
    if sample_cause is not None:
        return sample_cause
    if relative(reference.counts[index], run.counts[index]) > 1e-6:
        count, expected_count = run.counts[index], reference.counts[index]
        return (
            f"every rank read its samples, but {count:g} loss terms were counted and {expected_count:g} in one process"
        )
    if evidence.output:
        return f"every rank read the right samples, but the loss differs before any weight does: {evidence.output}"
    norm = "batch norm uses one rank's samples only, or " if evidence.case.has_batch_norm else ""
    return (
        f"every rank read the right samples, but the loss differs before any weight does: {norm}the model computes "
        "something different on parts of a batch than on the whole batch"
    )


def _begins_second_epoch(updates: Sequence[Update], index: int) -> bool:
    return index > 0 and updates[index].epoch > 0 and updates[index - 1].epoch == 0


def _update_ratio(reference: list[_State], run: list[_State]) -> float:
    """Return the size of the update of `run` relative to `reference`, by least squares over floating-point tensors."""
    product = square = 0.0
    for name, before in reference[0].items():
        is_parameter = before.is_floating_point() and "running_" not in name
        if is_parameter and before.shape == reference[1][name].shape:  # a buffer may change its shape
            expected_update = (reference[1][name] - before).double()
            update = (run[1][name] - run[0][name]).double()
            product += float((expected_update * update).sum())
            square += float((expected_update * expected_update).sum())
    return product / square if square else 1.0


def _distance_of_updates(reference: list[_State], run: list[_State], ratio: float) -> float:
    """Return the distance of the update of `run` from `ratio` times that of `reference`, relative to its norm."""
    squared_distance = square = 0.0
    for name, before in reference[0].items():
        expected_update, update = (reference[1][name] - before).double(), (run[1][name] - run[0][name]).double()
        squared_distance += float((update - ratio * expected_update).square().sum())
        square += float(update.square().sum())
    return (squared_distance / square) ** 0.5 if square else 0.0
