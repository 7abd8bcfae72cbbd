"""Run a workload for a few updates and keep losses, counts, evaluation and tensors."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.loop import evaluate, run_updates, wrap_user_errors
from everyrank.parallel.custom import clean_name
from everyrank.parallel.file_backed import file_backed, put_into_file
from everyrank.parallel.mesh import local_tensor, local_tensors
from everyrank.parallel.precision import DTYPES
from everyrank.parity.case import ParityCase, Segments
from everyrank.parity.rows import row_values
from everyrank.strategies import Prepared, prepare
from everyrank.workload import changed
from everyrank.world import World, group_of_one, on_rank_0, single_process_world
from everyrank.world.collectives import all_equal, fingerprints_by_rank, sum_over_ranks

__all__ = ["Trace", "distance", "finite_change", "trace", "trace_on_its_ranks"]

# A sum over a whole batch overflows fp16 earlier than its parts, and a skipped update is not a rounding error. So the
# comparison starts at a loss scale at which nothing overflows.
_SAFE_LOSS_SCALE = 256.0
_CHUNK_ELEMENTS = 1 << 20  # elements that are compared together


@dataclass(frozen=True)
class Trace:
    """The results of one run: loss and global count of each update, evaluation, tensors.

    finals      the tensors at the end of each segment, on rank 0
    moved       for each segment: the largest finite change of an element of each tensor
    gradients   the largest magnitude that each element of a parameter's gradient had in any update
    states      the tensors before the first update and after each one, if they are kept; on rank 0
    rows        for each update, and then for each batch of the evaluation: a value for each sample that this rank
                computed on, if they are recorded (see rows.py)
    not_compared   what is not in `finals`: tensors that cannot be gathered (custom parallelize functions), and values
                   in the model's state that are no tensors
    unequal_replicas   names of the replicated tensors that are not identical on all ranks
    """

    losses: list[float]
    counts: list[float]
    evaluation: dict[str, tuple[float, float]]
    finals: list[dict[str, Tensor]]
    replicas_equal: bool
    moved: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    states: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    rows: list[Tensor] = field(default_factory=list[Tensor])
    not_compared: tuple[str, ...] = ()
    unequal_replicas: tuple[str, ...] = ()


def trace(
    case: ParityCase,
    layout: Layout,
    world: World,
    segments: Segments,
    *,
    reverse: bool = False,
    jitter: int = 0,
    measure: bool = False,
    keep: bool = False,
    evaluates: bool = True,
) -> Trace:
    """Run the updates under `layout`, each segment from the initial state. A collective over `world`.

    `reverse` reverses the samples within each micro-batch. A positive `jitter` is the seed for moving each initial
    weight by one unit in the last place, up, down or not at all. `measure` records how far tensors move and how large
    gradients are (for `single`). `keep` keeps the tensors of every update and the values of the samples.
    """
    prepared = _prepare(case, layout, world, jitter)
    rows: list[Tensor] = []
    recording_prepared = _record_rows(prepared, rows) if keep else prepared
    initial = prepared.full_state() if measure or keep else {}
    snapshot = prepared.trainable.snapshot() if len(segments) > 1 else {}
    buffer_shapes = _buffer_shapes(prepared.model)
    states = [initial] if keep else []
    not_compared = (*prepared.not_compared, *_values_without_tensors(prepared.model))
    result = Trace([], [], {}, [], True, states=states, rows=rows, not_compared=not_compared)
    shares: list[Tensor] = []
    largest: dict[str, Tensor] = {}
    unequal_replicas: list[str] = []
    replicas_equal = True
    for number, updates in enumerate(segments):
        if number and _buffer_shapes(prepared.model) == buffer_shapes:
            prepared.trainable.restore(snapshot)
        elif number:  # the snapshot has no buffer that forward has created
            prepared = _prepare(case, layout, world, jitter)
            recording_prepared = _record_rows(prepared, rows) if keep else prepared
        for share in run_updates(recording_prepared, case.train_data, updates, reverse):
            shares.append(share)
            if keep:
                result.states.append(prepared.full_state())
            if measure:
                _largest_gradients(prepared, largest)
        result.finals.append(prepared.full_state())
        # before the next segment restores the replicas
        if prepared.are_replicas_equal and not all_equal(local_tensors(prepared.replicated_tensors), prepared.world):
            replicas_equal = False
            unequal_replicas += _unequal_replicas(prepared)
        if measure:
            result.moved.append(
                {name: finite_change(initial.get(name), value) for name, value in result.finals[-1].items()}
            )
    if layout.row.any_axes:  # a custom parallelize function gathers the tensors of the model as built
        shapes_now = _buffer_shapes(prepared.model)
        new_buffers = [name for name, shape in shapes_now.items() if buffer_shapes.get(name) != shape]
        result = dataclasses.replace(result, not_compared=(*result.not_compared, *new_buffers))
    totals = sum_over_ranks(torch.stack(shares), prepared.world)
    has_evaluation = case.eval_ends is not None and evaluates
    with group_of_one(prepared.world):  # a metric may call collectives
        evaluation = evaluate(recording_prepared, case.eval_ends) if has_evaluation else {}
    gradients = _gather_gradients(prepared, largest) if layout.axis is not None and measure else largest
    del prepared, recording_prepared, snapshot
    gc.collect()
    return dataclasses.replace(
        result,
        losses=[total / count if count else float("nan") for total, count in totals.tolist()],
        counts=totals[:, 1].tolist(),
        evaluation=evaluation,
        replicas_equal=replicas_equal,
        unequal_replicas=tuple(dict.fromkeys(unequal_replicas)),
        gradients=gradients,
    )


def _prepare(case: ParityCase, layout: Layout, world: World, jitter: int) -> Prepared:
    """Prepare the workload under `layout`; a positive `jitter` moves the initial weights."""
    workload = case.workload
    if jitter:
        step = torch.finfo(DTYPES[layout.precision]).eps
        workload = changed(workload, model=lambda *at: _jittered(case.workload.model(*at), step, jitter))
    with wrap_user_errors():
        prepared = prepare(workload, layout, world)
    if prepared.trainable.scaler is not None:
        prepared.trainable.scaler.scale = _SAFE_LOSS_SCALE
    return prepared


@torch.no_grad()
def _jittered(model: nn.Module, step: float, seed: int) -> nn.Module:
    """Multiply each weight by 1 + step, 1 or 1 - step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            # in float64, because the model may be built in a lower precision
            jittered_weights = parameter.data.double().contiguous()
            for chunk in jittered_weights.view(-1).split(_CHUNK_ELEMENTS) if not parameter.is_meta else ():
                signs = torch.randint(-1, 2, chunk.shape, generator=generator)
                chunk *= 1 + step * signs.to(parameter.device)
            is_in_file = parameter.data.untyped_storage().filename is not None
            parameter.data = jittered_weights
            if is_in_file:
                put_into_file(parameter)
    return model


def _buffer_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {clean_name(name): tuple(buffer.shape) for name, buffer in model.named_buffers()}


def _values_without_tensors(model: nn.Module) -> list[str]:
    """Return the names of values in a model's state dict that are no tensors, such as a dict of `get_extra_state`."""
    return [clean_name(name) for name, value in model.state_dict().items() if not isinstance(value, Tensor)]


def _unequal_replicas(prepared: Prepared) -> list[str]:
    """Return the names of the replicated tensors that are not identical on all ranks. A collective."""
    model, tensors = prepared.model, prepared.replicated_tensors
    names = {id(tensor): clean_name(name) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    rows = torch.stack(fingerprints_by_rank(local_tensors(tensors), prepared.world))
    is_unequal = (rows != rows[0]).any(0).tolist()
    return [names[id(t)] for t, differs in zip(tensors, is_unequal, strict=True) if differs and id(t) in names]


def _largest_gradients(prepared: Prepared, largest: dict[str, Tensor]) -> None:
    """Update the elementwise maximum of the rank's local gradients."""
    for name, parameter in prepared.model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad.detach())
            magnitudes = (gradient.to_dense() if gradient.is_sparse else gradient).abs().cpu()
            if name in largest:
                torch.maximum(largest[name], magnitudes, out=largest[name])
            else:
                largest[name] = file_backed(magnitudes) if prepared.parallel.is_meta else magnitudes


@torch.no_grad()
def _gather_gradients(prepared: Prepared, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather local parts into whole tensors on rank 0, without those that are all zero.

    The parts are written into the model's parameters, because `full_state` knows how to gather them. The model cannot
    be used afterwards.
    """
    for name, parameter in prepared.model.named_parameters(remove_duplicate=False):
        local = local_tensor(parameter)
        local.copy_(parts[name]) if name in parts else local.zero_()
    for buffer in prepared.model.buffers():
        local_tensor(buffer).zero_()
    return {name: tensor for name, tensor in prepared.full_state().items() if bool(tensor.any())}


def distance(reference: Tensor, tensor: Tensor, left_out: Tensor | None = None) -> float:
    """Return the largest difference between elements of two tensors of equal shape, without `left_out`.

    Two NaN are equal, as are two equal infinities. If only one of two elements is NaN or infinite, it is inf.
    It works in chunks: in float64, two whole tensors and their difference would need three times the memory.
    """
    flat = [tensor.reshape(-1) for tensor in (reference, tensor)]
    largest_difference = 0.0
    for start in range(0, reference.numel(), _CHUNK_ELEMENTS):
        expected, values = (tensor[start : start + _CHUNK_ELEMENTS] for tensor in flat)
        if left_out is not None:
            is_compared = ~left_out.reshape(-1)[start : start + _CHUNK_ELEMENTS]
            expected, values = expected[is_compared], values[is_compared]
        if expected.numel() and not torch.equal(expected, values):
            differences = (expected.double() - values.double()).abs()
            largest = float(differences.max())
            if largest != largest:  # a NaN, or the difference of two equal infinities
                is_different = (expected != values) & ~(expected.isnan() & values.isnan())
                largest = float(differences.where(is_different, 0.0).max())
            largest_difference = max(largest_difference, largest if largest == largest else float("inf"))
    return largest_difference


def finite_change(before: Tensor | None, after: Tensor) -> float:
    """Return how far the finite elements of a tensor moved; 0 for a buffer that is new or has a new shape.

    For example, a buffer with the largest value so far begins at -inf.
    """
    if before is None or before.shape != after.shape:
        return 0.0
    change = distance(before, after)
    return change if math.isfinite(change) else distance(before, after, ~(before.isfinite() & after.isfinite()))


def _record_rows(prepared: Prepared, rows: list[Tensor]) -> Prepared:
    """Wrap the strategy to record a value for each sample; ranks with the same samples count once."""
    is_counted = prepared.mesh.is_first("pipeline", "context", "tensor")

    def step(batches: Sequence[Batch]) -> Tensor:
        rows.append(torch.cat([row_values(batch) for batch in batches if is_counted] or [torch.zeros(0)]))
        return prepared.step(batches)

    def predict(batch: Batch) -> Any:
        rows.append(row_values(batch) if is_counted else torch.zeros(0))
        return prepared.predict(batch)

    return dataclasses.replace(prepared, step=step, predict=predict)


def trace_on_its_ranks(
    case: ParityCase, layout: Layout, world: World, key: str, segments: Segments, **options: Any
) -> Trace | None:
    """Run `trace` on the ranks of the layout: all, or only rank 0 while the others wait (None there)."""
    if layout.axis is not None:
        return trace(case, layout, world, segments, **options)
    return on_rank_0(
        world, f"{key}/alone", lambda: trace(case, layout, single_process_world(world), segments, **options)
    )
