"""`single`, and how far rounding alone moves it: what a layout is held against.

Rounding grows along a training: two runs that differ in the last bit part, slowly or fast, until nothing can be told
from a mistake. What can be compared is how far `single` stays close to perturbed runs of itself. Where that is not all
of the updates, they are cut into segments of that length which all begin from the initial state, so that the ragged
batch and the next epoch are compared, too.
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

from everyrank.errors import NoRoomError, NotFiniteError, UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.parity import cache
from everyrank.parity.case import ParityCase, Segments, by_gradient, single_like
from everyrank.parity.trace import Trace, distance, trace
from everyrank.world import World, from_rank_0, on_each_rank, single_process_world

__all__ = [
    "BY_NOISE",
    "UNSTEADY",
    "Reference",
    "ensure_references",
    "make_reference",
    "relative",
    "shorten_segments",
    "tensor_distance",
]

# how far perturbed runs of `single` may be from it in the loss where it still judges others
_LIMITS = {"float64": 1e-12, "float32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}
UNSTEADY = 1e-8  # in float64 and from equal weights, reversed: more is no rounding
# a gradient that is smaller than this part of the largest one is what rounding leaves of a sum that is zero
_NULL = {"float64": 1e-11, "float32": 1e-6}
_IN_PARTS = "single took its batch in several micro-batches: the whole did not fit"
BY_NOISE = 1e-2  # a tensor that rounding moves by this part of its way cannot be compared
_KEPT = (
    "segments",
    "loss_floors",
    "floors",
    "nulls",
    "is_cut",
    "reversed",
    "evaluation_floors",
)  # in files, beside the run itself
_PERTURBED: dict[str, list[dict[str, Any]]] = {
    "float64": [{"reverse": True}, {"jitter": 1}],
    "lower": [{"reverse": True}, {"jitter": 1}, {"jitter": 2}, {"jitter": 3}],
}


@dataclass(frozen=True)
class Reference:
    """What `single` leaves, and how far rounding alone moves that.

    segments      the updates that were run
    loss_floors   for each update: the largest distance of a perturbed run's loss, relative; within a segment it does
                  not shrink
    floors        of each segment: name -> the largest distance of a perturbed run's tensor, null elements left out
    nulls         elements of parameters whose true gradient is zero: they move by rounding alone
    is_cut        whether rounding has grown too much for all of the updates
    evaluation_floors   of the loss and each metric: the largest distance of a perturbed run's sum, relative
    reversed      of each segment: how far the first loss is from that of the same samples in reverse, relative
    name          the layout that was run: `single`, or what stood in for it
    """

    trace: Trace
    segments: Segments
    loss_floors: list[float]
    floors: list[dict[str, float]]
    nulls: dict[str, Tensor]
    is_cut: bool = False
    reversed: tuple[float, ...] = ()
    evaluation_floors: dict[str, float] = field(default_factory=dict[str, float])
    name: str = "single"

    @property
    def where(self) -> str:
        """Where it ran, for messages."""
        return "in one process" if self.name == "single" else f"under {self.name}"

    def is_noise(self, number: int, name: str) -> bool:
        """Whether rounding alone moves this tensor so far in a segment that nothing can be told from where it ends."""
        moved = self.trace.moved[number].get(name, 0.0)
        return bool(moved) and self.floors[number][name] > BY_NOISE * moved


def ensure_references(case: ParityCase, layout: Layout, world: World, key: str) -> None:
    """Run `single` as `layout` needs it, where that has not been done yet, and see how far it can be compared.

    `key` is a name used once. A collective. Raises `NotFiniteError` where `single` has no number to compare with, and
    `CannotRunError` where it does not fit: its batch is cut into ever more parts first, where that changes nothing.
    """
    try:
        _ensure_references(case, layout, world, key)
    except NoRoomError as error:
        parts = case.accumulate * 2 if case.accumulate > 2 else case.accumulate + 1
        if case.has_batch_norm or case.reference is not None or parts > case.workload.global_batch:
            raise
        case.accumulate = parts
        case.notes += [] if _IN_PARTS in case.notes else [_IN_PARTS]
        gc.collect()
        try:
            ensure_references(case, layout, world, f"{key}/{parts} parts")
        except UnsupportedLayoutError:  # a loss over the whole batch
            raise error from None


def _ensure_references(case: ParityCase, layout: Layout, world: World, key: str) -> None:
    for attempt in itertools.count():
        wanted = {
            str(single): single
            for single in (single_like(case, layout, p, world.size) for p in case.precisions(layout))
        }
        missing = {text: single for text, single in wanted.items() if text not in case.segments}
        if not missing:
            return
        here = f"{key}/references/{attempt}"
        told = from_rank_0(
            world, f"{here}/kept", functools.partial(_from_cache, case, missing, single_process_world(world))
        )
        for text, segments in told.items():
            case.segments[text] = cache.decode_segments(segments)
            case.from_disk.add(text)
            missing.pop(text)
        made = _run(case, missing, world, here)
        if from_rank_0(world, f"{here}/moved", lambda made=made: _tells_nothing(made)) and not case.by_gradient:
            case.by_gradient = True
            case.workload = by_gradient(case.workload)
            case.notes.append("nothing moves (a learning rate of 0): the gradients alone are compared")
            case.references.clear()
            case.segments.clear()
            case.from_disk.clear()
            case.names.clear()
            continue
        for text, segments in from_rank_0(world, f"{here}/cut", functools.partial(_keep, case, made)).items():
            case.segments[text] = cache.decode_segments(segments)


def _from_cache(case: ParityCase, singles: dict[str, Layout], world: World) -> dict[str, Any]:
    """Those that an earlier call has left on the disk, on rank 0: their segments."""
    found: dict[str, Any] = {}
    for text, single in singles.items() if case.is_cached else ():
        case.names[text] = cache.name_of(case, single, world)
        kept = cache.load_references(case.names[text] or "")
        if kept is not None:
            case.references[text] = Reference(kept[0], **kept[1])
            found[text] = cache.encode_segments(case.references[text].segments)
    return found


def _run(case: ParityCase, singles: dict[str, Layout], world: World, key: str) -> dict[str, Any]:
    """Each of these and its perturbed runs, spread over the ranks, cut until rounding is small; on rank 0."""
    planned = {text: _plan(case, single.precision) for text, single in singles.items()}
    plans = dict(planned)
    done: dict[str, Any] = {}
    attempt = 0
    while left := {text: plan for text, plan in plans.items() if text not in done}:
        attempt += 1
        jobs = [(text, options) for text in left for options in _runs_of(singles[text])]
        traces = run_on_all_ranks(case, [(singles[t], plans[t], o) for t, o in jobs], world, f"{key}/{attempt}")
        found: dict[str, Reference] = {}
        if world.rank == 0:
            for text in left:
                own = [one for (name, _), one in zip(jobs, traces, strict=True) if name == text]
                found[text] = make_reference(own[0], own[1:], plans[text], singles[text].precision)
        lengths = from_rank_0(
            world,
            f"{key}/{attempt}/lengths",
            lambda found=found: {text: _steady_length(one, singles[text].precision) for text, one in found.items()},
        )
        for text, plan in left.items():
            shorter = plan if lengths[text] is None else shorten_segments(planned[text], lengths[text])
            if shorter == plan:
                is_cut = plan != planned[text]
                name = "single" if singles[text].axis is None else str(replace(singles[text], precision="float32"))
                done[text] = replace(found[text], is_cut=is_cut, name=name) if world.rank == 0 else None
            plans[text] = shorter
    return done


def _plan(case: ParityCase, precision: str) -> Segments:
    planned = case.planned(precision)
    if not case.by_gradient:
        return planned
    # an update of the gradient's own size leads nowhere: each one begins anew
    flat = [update for segment in planned for update in segment]
    return [[flat[index]] for index in sorted({0, len(flat) // 2, len(flat) - 1})]


def _runs_of(single: Layout) -> list[dict[str, Any]]:
    """`single` as it is, then perturbed; the evaluation is compared in float64 alone."""
    perturbed = _PERTURBED.get(single.precision, _PERTURBED["lower"])
    return [{**one, "evaluates": single.precision == "float64"} for one in ({"measure": True}, *perturbed)]


def shorten_segments(segments: Segments, length: int) -> Segments:
    """The updates in segments of at most `length`: the first ones, and those from the last one of an epoch on."""
    if all(len(segment) <= length for segment in segments):
        return segments
    flat = [update for segment in segments for update in segment]
    border = next((index for index in range(1, len(flat)) if flat[index].epoch > flat[index - 1].epoch), len(flat)) - 1
    starts = [0, max(length, border)] + ([border + 1] if length == 1 else [])
    return [flat[start : start + length] for start in starts if start < len(flat)]


def _steady_length(reference: Reference, precision: str) -> int | None:
    """How many updates after a start rounding stays small, at least one: from equal weights all can be compared.

    None where that is all of the updates.
    """
    lengths: list[int] = []
    floors = iter(reference.loss_floors)
    for segment in reference.segments:
        own = list(itertools.islice(floors, len(segment)))
        lengths += [max(1, index) for index, floor in enumerate(own) if floor > _LIMITS[precision]][:1]
    shortest = min(lengths, default=None)
    return None if shortest is None or max(map(len, reference.segments)) <= shortest else shortest


def make_reference(single: Trace, perturbed: Sequence[Trace], segments: Segments, precision: str) -> Reference:
    """What `single` left beside its perturbed runs. Raises `NotFiniteError` where it has no number."""
    for run in (single, *perturbed):
        for index, loss in enumerate(run.losses):
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"update {index}: the loss of single in {precision} is {loss}; nothing to compare with"
                )
    nulls = _nulls(single.gradients, precision)
    spreads = iter([max(relative(a, other.losses[i]) for other in perturbed) for i, a in enumerate(single.losses)])
    loss_floors: list[float] = []
    for segment in segments:
        loss_floors += itertools.accumulate(itertools.islice(spreads, len(segment)), max)
    floors = [
        {
            name: max(tensor_distance(final[name], run.finals[n][name], nulls.get(name)) for run in perturbed)
            for name in final
        }
        for n, final in enumerate(single.finals)
    ]
    starts = itertools.accumulate((len(segment) for segment in segments[:-1]), initial=0)
    reverse = tuple(relative(single.losses[start], perturbed[0].losses[start]) for start in starts)
    spreads_of_sums = {
        name: max((relative(total, run.evaluation[name][0]) for run in perturbed if run.evaluation), default=0.0)
        for name, (total, _) in single.evaluation.items()
    }
    return Reference(single, segments, loss_floors, floors, nulls, reversed=reverse, evaluation_floors=spreads_of_sums)


def _nulls(gradients: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Elements of parameters whose gradient was never more than rounding leaves of zero; where there are some."""
    part = _NULL.get(precision, 0.0)
    scale = max((float(one.max()) for one in gradients.values() if one.numel()), default=0.0)
    found = {name: (one > 0) & (one < part * scale) for name, one in gradients.items()}
    return {name: mask for name, mask in found.items() if bool(mask.any())}


def tensor_distance(one: Tensor, other: Tensor, nulls: Tensor | None) -> float:
    """The largest difference between elements, those left out that rounding alone moves; inf for another shape."""
    return distance(one, other, nulls) if one.shape == other.shape else float("inf")


def relative(reference: float, value: float) -> float:
    """The distance of `value` from `reference`, relative to that; inf where one of them is NaN."""
    if reference == value:
        return 0.0
    difference = abs(value - reference) / max(abs(reference), 1e-300)
    return difference if difference == difference else float("inf")


def _tells_nothing(made: dict[str, Any]) -> bool:
    """Whether there were gradients, and no parameter moved by more than rounding."""

    def is_told(reference: Reference) -> bool:
        return any(
            moved[name] and not reference.is_noise(number, name)
            for number, moved in enumerate(reference.trace.moved)
            for name in reference.trace.gradients
        )

    return any(reference.trace.gradients and not is_told(reference) for reference in made.values())


def _keep(case: ParityCase, made: dict[str, Any]) -> dict[str, Any]:
    """Keep what was made, on the disk too; the segments of each."""
    case.references.update(made)
    for text, reference in made.items():
        name = case.names.get(text)
        if name is not None:
            rest = {key: getattr(reference, key) for key in _KEPT}
            cache.save(name, reference.trace, rest)
    return {text: cache.encode_segments(reference.segments) for text, reference in made.items()}


# --- runs of `single` that do not need each other, shared out among the ranks; what they left, on rank 0


def run_on_all_ranks(
    case: ParityCase, jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], world: World, key: str
) -> list[Trace]:
    """The runs, each done by one rank on its own device; all of them on rank 0, [] elsewhere."""
    if any(single.axis is not None for single, _, _ in jobs):
        runs = [trace(case, single, world, segments, **options) for single, segments, options in jobs]
        return runs if world.rank == 0 else []
    here = replace(single_process_world(world), threads=world.threads, loader_workers=world.loader_workers)
    holders = _shared_out(jobs, world.size, world.device.type == "cuda" and world.backend == "gloo")

    def work() -> dict[int, Trace]:
        mine = [index for index, rank in enumerate(holders) if rank == world.rank]
        return {index: trace(case, jobs[index][0], here, jobs[index][1], **jobs[index][2]) for index in mine}

    own = on_each_rank(world, f"{key}/work", work)
    found: list[Trace] = []
    for index, holder in enumerate(holders):
        if world.rank == 0:
            found.append(own[index] if holder == 0 else _received(world, holder, f"{key}/{index}"))
        elif world.rank == holder:
            _send(own.pop(index), world, f"{key}/{index}")
    return found


def _shared_out(jobs: Sequence[tuple[Layout, Segments, dict[str, Any]]], size: int, is_shared: bool) -> list[int]:
    """The rank of each run: always the one that has least to do so far; float64 takes about twice as long."""
    # ranks that share a card share its memory, which one run at a time may fill
    load = [0] * (1 if is_shared else size)
    holders: list[int] = []
    for single, segments, _ in jobs:
        holders.append(min(range(len(load)), key=load.__getitem__))
        load[holders[-1]] += sum(map(len, segments)) * (2 if single.precision == "float64" else 1)
    return holders


def _send(run: Trace, world: World, key: str) -> None:
    numbers = {"losses": run.losses, "counts": run.counts, "evaluation": run.evaluation, "moved": run.moved}
    groups = [*run.finals, run.gradients]
    shapes = [[(name, str(t.dtype)[6:], list(t.shape)) for name, t in group.items()] for group in groups]
    world.store.set(f"sent/{key}", json.dumps({"numbers": numbers, "shapes": shapes}))
    for group in groups:
        for tensor in group.values():
            if tensor.numel():
                dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=0, group=world.group)


def _received(world: World, holder: int, key: str) -> Trace:
    sent: Any = world.store.get(f"sent/{key}")
    head = json.loads(sent.decode())
    groups: list[dict[str, Tensor]] = []
    for shapes in head["shapes"]:
        groups.append({name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes})
        for tensor in groups[-1].values():
            if tensor.numel():
                dist.recv(tensor.reshape(-1).view(torch.uint8), src=holder, group=world.group)
    numbers = head["numbers"]
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
