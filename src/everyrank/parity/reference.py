"""Run `single` and its perturbed runs, to measure how far rounding moves the results.

Rounding errors grow during training: two runs that differ in the last bit diverge until a mistake cannot be told from
rounding. So a layout is compared over the updates for which `single` stays close to perturbed runs of itself. If these
are not all updates, they are divided into segments of that length that start from the initial state, so that the uneven
last batch and the next epoch are compared too.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.errors import NotFiniteError, OutOfMemoryError, UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.parity import cache
from everyrank.parity.case import ParityCase, Segments, single_like, with_gradient_update
from everyrank.parity.trace import Trace, distance, trace
from everyrank.world import World, from_rank_0, on_each_rank, single_process_world

__all__ = [
    "MAX_REVERSED_DIFFERENCE",
    "NOISE_FRACTION",
    "Reference",
    "ensure_references",
    "make_reference",
    "relative",
    "shorten_segments",
    "tensor_distance",
]

# largest distance of perturbed runs of `single` in the loss at which layouts are still compared
_LIMITS = {"float64": 1e-12, "float32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}
_LOSS_SCALE = 1e-3  # of the largest loss and of the largest gradient; rounding of a loss is far smaller
MAX_REVERSED_DIFFERENCE = 1e-8  # float64, equal weights, samples in reverse; rounding is far smaller
# a gradient below this fraction of the largest one is zero except for rounding
_ZERO_GRADIENT = {"float64": 1e-11, "float32": 1e-6}
_MICRO_BATCHED = "single split its batch into micro-batches, because the whole batch did not fit"
NOISE_FRACTION = 1e-2  # a tensor that rounding moves by this fraction of its change cannot be compared
_CACHED_FIELDS = (
    "segments",
    "loss_floors",
    "floors",
    "zero_gradient_masks",
    "is_truncated",
    "reversed_differences",
    "evaluation_floors",
    "loss_scale",
)  # the fields in cache files, in addition to the run
_PERTURBED: dict[str, list[dict[str, Any]]] = {
    "float64": [{"reverse": True}, {"jitter": 1}],
    "lower": [{"reverse": True}, {"jitter": 1}, {"jitter": 2}, {"jitter": 3}],
}


@dataclass(frozen=True)
class Reference:
    """The run of `single`, and how far rounding moves it.

    segments      the updates that were run
    loss_floors   for each update: the largest distance of a perturbed run's loss, relative; within a segment it does
                  not shrink
    floors        for each segment: name -> the largest distance of a perturbed run's tensor, zero-gradient elements
                  excluded
    zero_gradient_masks         elements of parameters whose true gradient is zero: only rounding moves them
    is_truncated        whether rounding has grown too much to compare all updates
    evaluation_floors   for the loss and each metric: the largest distance of a perturbed run's sum, relative
    reversed_differences   for each segment: relative difference of the first loss when the samples are reversed
    loss_scale    losses below it are compared relative to it, because their terms cancel; see `_loss_scale`
    name          the layout that was run: `single` or its substitute
    """

    trace: Trace
    segments: Segments
    loss_floors: list[float]
    floors: list[dict[str, float]]
    zero_gradient_masks: dict[str, Tensor]
    is_truncated: bool = False
    reversed_differences: tuple[float, ...] = ()
    evaluation_floors: dict[str, float] = field(default_factory=dict[str, float])
    loss_scale: float = 0.0
    name: str = "single"

    @property
    def where(self) -> str:
        """Where it ran, for messages."""
        return "in one process" if self.name == "single" else f"under {self.name}"

    def is_noise(self, number: int, name: str) -> bool:
        """Whether rounding moves this tensor so far in a segment that its final value cannot be compared."""
        moved = self.trace.moved[number].get(name, 0.0)
        return bool(moved) and self.floors[number][name] > NOISE_FRACTION * moved


def ensure_references(case: ParityCase, layout: Layout, world: World, key: str) -> None:
    """Run `single` for this layout if it has not run yet, and find the updates that can be compared.

    `key` must be unique. A collective. Raises `NotFiniteError` if the loss of `single` is not finite, and
    `CannotRunError` if it does not fit into memory; before that, its batch is split into more micro-batches if this
    does not change the result.
    """
    try:
        _ensure_references(case, layout, world, key)
    except OutOfMemoryError as error:
        parts = case.accumulate * 2 if case.accumulate > 2 else case.accumulate + 1
        if case.has_batch_norm or case.reference is not None or parts > case.workload.global_batch:
            raise
        case.accumulate = parts
        case.notes += [] if _MICRO_BATCHED in case.notes else [_MICRO_BATCHED]
        gc.collect()
        try:
            ensure_references(case, layout, world, f"{key}/{parts} parts")
        except UnsupportedLayoutError:  # a loss over the whole batch
            raise error from None


def _ensure_references(case: ParityCase, layout: Layout, world: World, key: str) -> None:
    for attempt in itertools.count():
        singles_by_text = {
            str(single): single
            for single in (single_like(case, layout, p, world.size) for p in case.precisions(layout))
        }
        missing = {text: single for text, single in singles_by_text.items() if text not in case.segments}
        if not missing:
            return
        attempt_key = f"{key}/references/{attempt}"
        cached = from_rank_0(
            world, f"{attempt_key}/kept", functools.partial(_from_cache, case, missing, single_process_world(world))
        )
        for text, segments in cached.items():
            case.segments[text] = cache.decode_segments(segments)
            case.from_disk.add(text)
            missing.pop(text)
        new_references = _run(case, missing, world, attempt_key)
        if (
            from_rank_0(
                world,
                f"{attempt_key}/moved",
                functools.partial(_has_no_updates, new_references, {t: missing[t] for t in new_references}),
            )
            and not case.compares_gradients
        ):
            case.compares_gradients = True
            case.workload = with_gradient_update(case.workload)
            case.notes.append("no parameter moves (a learning rate of 0?), so only the gradients are compared")
            case.references.clear()
            case.segments.clear()
            case.from_disk.clear()
            case.names.clear()
            continue
        for text, segments in from_rank_0(
            world, f"{attempt_key}/cut", functools.partial(_store_references, case, new_references)
        ).items():
            case.segments[text] = cache.decode_segments(segments)


def _from_cache(case: ParityCase, singles: dict[str, Layout], world: World) -> dict[str, Any]:
    """Read runs of earlier calls from disk on rank 0. Returns their segments."""
    result: dict[str, Any] = {}
    for text, single in singles.items() if case.is_cached else ():
        case.names[text] = cache.cache_name(case, single, world)
        cached = cache.load_reference(case.names[text] or "")
        if cached is not None:
            case.references[text] = Reference(cached[0], **cached[1])
            result[text] = cache.encode_segments(case.references[text].segments)
    return result


def _run(case: ParityCase, singles: dict[str, Layout], world: World, key: str) -> dict[str, Any]:
    """Run each layout and its perturbed runs, spread over the ranks; shorten segments until rounding is small. On rank
    0.
    """
    planned = {text: _plan(case, single.precision) for text, single in singles.items()}
    plans = dict(planned)
    finished: dict[str, Any] = {}
    attempt = 0
    while remaining := {text: plan for text, plan in plans.items() if text not in finished}:
        attempt += 1
        jobs = [(text, options) for text in remaining for options in _run_options(singles[text])]
        traces = run_on_all_ranks(case, [(singles[t], plans[t], o) for t, o in jobs], world, f"{key}/{attempt}")
        references: dict[str, Reference] = {}
        if world.rank == 0:
            for text in remaining:
                runs = [run for (name, _), run in zip(jobs, traces, strict=True) if name == text]
                references[text] = make_reference(runs[0], runs[1:], plans[text], singles[text].precision)
        lengths = from_rank_0(
            world,
            f"{key}/{attempt}/lengths",
            lambda references=references: {
                text: _comparable_steps(run, singles[text].precision) for text, run in references.items()
            },
        )
        for text, plan in remaining.items():
            shorter = plan if lengths[text] is None else shorten_segments(planned[text], lengths[text])
            if shorter == plan:
                is_truncated = plan != planned[text]
                name = "single" if singles[text].axis is None else str(replace(singles[text], precision="float32"))
                finished[text] = (
                    replace(references[text], is_truncated=is_truncated, name=name) if world.rank == 0 else None
                )
            plans[text] = shorter
    return finished


def _plan(case: ParityCase, precision: str) -> Segments:
    planned = case.planned(precision)
    if not case.compares_gradients:
        return planned
    # an update as large as the gradient does not train, so each update starts from the initial state
    flat = [update for segment in planned for update in segment]
    return [[flat[index]] for index in sorted({0, len(flat) // 2, len(flat) - 1})]


def _run_options(single: Layout) -> list[dict[str, Any]]:
    """Return the options of the plain run, then of the perturbed ones. Only float64 runs evaluate."""
    perturbed = _PERTURBED.get(single.precision, _PERTURBED["lower"])
    return [{**options, "evaluates": single.precision == "float64"} for options in ({"measure": True}, *perturbed)]


def shorten_segments(segments: Segments, length: int) -> Segments:
    """Divide the updates into segments of at most `length`: the first updates, and those from an epoch's last update
    on.
    """
    if all(len(segment) <= length for segment in segments):
        return segments
    flat = [update for segment in segments for update in segment]
    border = next((index for index in range(1, len(flat)) if flat[index].epoch > flat[index - 1].epoch), len(flat)) - 1
    starts = [0, max(length, border)] + ([border + 1] if length == 1 else [])
    return [flat[start : start + length] for start in starts if start < len(flat)]


def _comparable_steps(reference: Reference, precision: str) -> int | None:
    """Return how many updates from the start stay within the rounding limits (at least one), or None for all."""
    lengths: list[int] = []
    floors = iter(reference.loss_floors)
    for segment in reference.segments:
        floors_of_segment = list(itertools.islice(floors, len(segment)))
        lengths += [max(1, index) for index, floor in enumerate(floors_of_segment) if floor > _LIMITS[precision]][:1]
    shortest = min(lengths, default=None)
    return None if shortest is None or max(map(len, reference.segments)) <= shortest else shortest


def make_reference(single: Trace, perturbed: Sequence[Trace], segments: Segments, precision: str) -> Reference:
    """Combine a run of `single` with its perturbed runs. Raises `NotFiniteError` for a loss that is not finite."""
    for run in (single, *perturbed):
        for index, loss in enumerate(run.losses):
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"update {index}: the loss of single in {precision} is {loss}, so no layout can be compared with it"
                )
    zero_gradient_masks = _zero_gradient_masks(single.gradients, precision)
    scale = _loss_scale(single)
    distances = iter(
        [max(relative(a, other.losses[i], scale) for other in perturbed) for i, a in enumerate(single.losses)]
    )
    loss_floors: list[float] = []
    for segment in segments:
        loss_floors += itertools.accumulate(itertools.islice(distances, len(segment)), max)
    floors = [
        {
            name: max(
                tensor_distance(final[name], run.finals[n][name], zero_gradient_masks.get(name)) for run in perturbed
            )
            for name in final
        }
        for n, final in enumerate(single.finals)
    ]
    starts = itertools.accumulate((len(segment) for segment in segments[:-1]), initial=0)
    reversed_differences = tuple(relative(single.losses[start], perturbed[0].losses[start], scale) for start in starts)
    evaluation_distances = {
        name: max(
            (
                relative(total, run.evaluation[name][0], scale * count if name == "loss" else 0.0)
                for run in perturbed
                if run.evaluation
            ),
            default=0.0,
        )
        for name, (total, count) in single.evaluation.items()
    }
    return Reference(
        single,
        segments,
        loss_floors,
        floors,
        zero_gradient_masks,
        reversed_differences=reversed_differences,
        evaluation_floors=evaluation_distances,
        loss_scale=scale,
    )


def _loss_scale(single: Trace) -> float:
    """Return the size below which a loss is not compared relative to itself.

    A loss whose terms cancel, such as -(ratio * advantage) with advantages of mean 0, is nothing but rounding. Its
    gradients show how large its terms are.
    """
    gradients = (float(gradient.max()) for gradient in single.gradients.values() if gradient.numel())
    return _LOSS_SCALE * max(0.0, *map(abs, single.losses), *filter(math.isfinite, gradients))


def _zero_gradient_masks(gradients: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Return masks of the elements whose true gradient is zero, for parameters that have any."""
    limit = _ZERO_GRADIENT.get(precision, 0.0)
    scale = max((float(largest.max()) for largest in gradients.values() if largest.numel()), default=0.0)
    masks = {name: (largest > 0) & (largest < limit * scale) for name, largest in gradients.items()}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def tensor_distance(reference: Tensor, tensor: Tensor, zero_gradient_masks: Tensor | None) -> float:
    """Return the largest difference between elements, without zero-gradient ones; inf for different shapes."""
    return distance(reference, tensor, zero_gradient_masks) if reference.shape == tensor.shape else float("inf")


def relative(reference: float, value: float, scale: float = 0.0) -> float:
    """Return the distance of `value` from `reference`, relative to `reference` or to a larger `scale`; inf for NaN."""
    if reference == value:
        return 0.0
    difference = abs(value - reference) / max(abs(reference), scale, 1e-300)
    return difference if difference == difference else float("inf")


def _has_no_updates(new_references: dict[str, Any], singles: dict[str, Layout]) -> bool:
    """Whether there were gradients but no parameter moved by more than rounding, in float64.

    In bf16, rounding may exceed what a few updates move.
    """

    def has_moved(reference: Reference) -> bool:
        # a state_dict with names of its own has no entry for some parameters
        return any(
            moved[name] and not reference.is_noise(number, name)
            for number, moved in enumerate(reference.trace.moved)
            for name in reference.trace.gradients.keys() & moved.keys() or moved
        )

    precise = [reference for text, reference in new_references.items() if singles[text].precision == "float64"]
    return any(reference.trace.gradients and not has_moved(reference) for reference in precise)


def _store_references(case: ParityCase, new_references: dict[str, Any]) -> dict[str, Any]:
    """Store the runs in the case and on disk. Returns the segments of each."""
    case.references.update(new_references)
    for text, reference in new_references.items():
        name = case.names.get(text)
        if name is not None:
            fields = {key: getattr(reference, key) for key in _CACHED_FIELDS}
            cache.save_reference(name, reference.trace, fields)
    return {text: cache.encode_segments(reference.segments) for text, reference in new_references.items()}


# --- independent runs of `single`, distributed over the ranks; the traces are sent to rank 0


def run_on_all_ranks(
    case: ParityCase, jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], world: World, key: str
) -> list[Trace]:
    """Distribute the runs over the ranks, each on its own device. Returns all traces on rank 0, [] elsewhere."""
    if any(single.axis is not None for single, _, _ in jobs):
        runs = [trace(case, single, world, segments, **options) for single, segments, options in jobs]
        return runs if world.rank == 0 else []
    alone = replace(single_process_world(world), threads=world.threads, loader_workers=world.loader_workers)
    assigned_ranks = _assign_ranks(jobs, world.size, world.device.type == "cuda" and world.backend == "gloo")

    def work() -> dict[int, Trace]:
        local_indices = [index for index, rank in enumerate(assigned_ranks) if rank == world.rank]
        return {index: trace(case, jobs[index][0], alone, jobs[index][1], **jobs[index][2]) for index in local_indices}

    local_runs = on_each_rank(world, f"{key}/work", work)
    runs_in_order: list[Trace] = []
    for index, holder in enumerate(assigned_ranks):
        if world.rank == 0:
            runs_in_order.append(local_runs[index] if holder == 0 else _receive(world, holder, f"{key}/{index}"))
        elif world.rank == holder:
            _send(local_runs.pop(index), world, f"{key}/{index}")
    return runs_in_order


def _assign_ranks(jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], size: int, is_shared: bool) -> list[int]:
    """Assign each run to the rank with the least work so far; float64 counts twice."""
    # ranks that share a GPU share its memory, so only one of them runs
    load = [0] * (1 if is_shared else size)
    assigned_ranks: list[int] = []
    for single, segments, _ in jobs:
        assigned_ranks.append(min(range(len(load)), key=load.__getitem__))
        load[assigned_ranks[-1]] += sum(map(len, segments)) * (2 if single.precision == "float64" else 1)
    return assigned_ranks


def _send(run: Trace, world: World, key: str) -> None:
    numbers = {"losses": run.losses, "counts": run.counts, "evaluation": run.evaluation, "moved": run.moved}
    groups = [*run.finals, run.gradients]
    shapes = [[(name, str(t.dtype)[6:], list(t.shape)) for name, t in group.items()] for group in groups]
    world.store.set(f"sent/{key}", json.dumps({"numbers": numbers, "shapes": shapes}))
    for group in groups:
        for tensor in group.values():
            if tensor.numel():
                dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=0, group=world.group)


def _receive(world: World, source_rank: int, key: str) -> Trace:
    message: Any = world.store.get(f"sent/{key}")
    header = json.loads(message.decode())
    groups: list[dict[str, Tensor]] = []
    for shapes in header["shapes"]:
        groups.append({name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes})
        for tensor in groups[-1].values():
            if tensor.numel():
                dist.recv(tensor.reshape(-1).view(torch.uint8), src=source_rank, group=world.group)
    numbers = header["numbers"]
    evaluation = {name: (total, count) for name, (total, count) in numbers["evaluation"].items()}
    return Trace(
        numbers["losses"],
        numbers["counts"],
        evaluation,
        groups[:-1],
        True,
        moved=numbers["moved"],
        gradients=groups[-1],
    )
