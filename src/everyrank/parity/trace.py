"""Run a workload for a few updates and keep what it leaves: losses, counts, evaluation, tensors."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.collectives import all_equal, sum_over_ranks
from everyrank.data import Update, all_updates, samples_per_epoch, updates_per_epoch
from everyrank.layout import Layout
from everyrank.loop import blame_workload, evaluate, planned_updates, run_updates
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.construct import on_cpu
from everyrank.parallel.mesh import local_tensors
from everyrank.strategies import prepare
from everyrank.workload import Workload
from everyrank.world import World, alone, on_rank_0

__all__ = ["Subject", "Trace", "chosen_updates", "references", "single_like", "subject_of", "trace", "trace_in_place"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A sum over a whole batch overflows fp16 a little earlier than its parts do, and a skipped update is no rounding:
# the comparison starts at a loss scale where nothing overflows.
_QUIET_SCALE = 256.0


@dataclass(frozen=True)
class Trace:
    """What one run leaves: for each update the loss and the global count; evaluation; the final tensors.

    `states` holds the tensors before the first update and after each of the kept ones; on rank 0 only.
    """

    losses: list[float]
    counts: list[float]
    evaluation: dict[str, tuple[float, float]]
    final: dict[str, Tensor]
    replicas_equal: bool
    states: list[dict[str, Tensor]]


@dataclass
class Subject:
    """What is compared: a workload with its data, the updates to run, and the runs of `single` made so far."""

    workload: Workload
    train_data: Any
    eval_data: Any
    updates: list[Update]
    notes: list[str]
    has_batch_norm: bool
    references: dict[str, list[Trace]] = field(default_factory=dict[str, list[Trace]])


def subject_of(workload: Workload, train_data: Any, eval_data: Any, steps: int) -> Subject:
    """The workload as it is checked: dropout set to 0, and few updates that still cross an epoch and a ragged batch."""
    with blame_workload():
        model = on_cpu(workload)
        num_dropouts = _without_dropout(model)
    quiet = dataclasses.replace(workload, model=lambda *devices: _quiet(workload.model(*devices)))
    steps = min(steps, planned_updates(workload, len(train_data)))
    updates = chosen_updates(samples_per_epoch(workload, len(train_data)), workload.global_batch, steps)
    notes = [f"dropout set to 0 in {num_dropouts} modules"] if num_dropouts else []
    return Subject(quiet, train_data, eval_data, updates, notes, has_batch_norm(model))


def chosen_updates(length: int, global_batch: int, steps: int) -> list[Update]:
    """`steps` updates: the first of epoch 0, its last (which may be ragged), and the first of epoch 1.

    The order of samples is a function of seed, epoch and step alone, so the updates between can be left out.
    """
    per_epoch = updates_per_epoch(length, global_batch)
    if per_epoch <= steps // 2 or steps < 3:
        return list(all_updates(steps, per_epoch))
    first = steps // 2 - 1
    places = [(0, index) for index in range(first)] + [(0, per_epoch - 1)]
    places += [(1, index) for index in range(steps - first - 1)]
    return [Update(step, epoch, index) for step, (epoch, index) in enumerate(places)]


def _quiet(model: nn.Module) -> nn.Module:
    _without_dropout(model)
    return model


def _without_dropout(model: nn.Module) -> int:
    """Set every dropout to 0; how many modules that changed."""
    changed = 0
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ("dropout",):  # pyright: ignore[reportPrivateUsage]
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed += 1
    return changed


def trace(
    subject: Subject,
    layout: Layout,
    world: World,
    reverse: bool = False,
    jitter: int = 0,
    updates: Sequence[Update] | None = None,
    keep: int = 0,
) -> Trace:
    """Run the updates under `layout`. A collective over `world`.

    `reverse` turns the samples round within each micro-batch. A `jitter` above 0 is the seed by which each initial
    weight is moved one unit in the last place, up, down or not at all. The tensors are kept before the first update
    and after the first `keep` ones.
    """
    workload = subject.workload
    if jitter:
        step = torch.finfo(_DTYPES[layout.precision]).eps
        workload = dataclasses.replace(workload, model=lambda *at: _moved(subject.workload.model(*at), step, jitter))
    updates = subject.updates if updates is None else updates
    with blame_workload():
        prepared = prepare(workload, layout, world)
    if prepared.scale is not None:
        prepared.scale.scale = _QUIET_SCALE
    states = [prepared.state()] if keep else []
    shares: list[Tensor] = []
    for share in run_updates(workload, subject.train_data, layout, world, prepared, updates, reverse):
        shares.append(share)
        if len(states) <= keep and keep:
            states.append(prepared.state())
    totals = sum_over_ranks(torch.stack(shares), prepared.mesh.world)
    evaluation: dict[str, tuple[float, float]] = {}
    if subject.eval_data is not None and not keep:
        evaluation = evaluate(workload, subject.eval_data, layout, world, prepared)
    replicas_equal = all_equal(local_tensors(prepared.replicas), prepared.mesh.world)
    final = prepared.state()
    del prepared
    gc.collect()
    return Trace(
        losses=[total / count if count else float("nan") for total, count in totals.tolist()],
        counts=totals[:, 1].tolist(),
        evaluation=evaluation,
        final=final,
        replicas_equal=replicas_equal,
        states=states,
    )


@torch.no_grad()
def _moved(model: nn.Module, step: float, seed: int) -> nn.Module:
    """The model with each weight multiplied by 1 + step, 1 or 1 - step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(-1, 2, parameter.shape, generator=generator)
        parameter.mul_(1 + step * signs)
    return model


def trace_in_place(subject: Subject, layout: Layout, world: World, key: str, **options: Any) -> Trace | None:
    """`trace` where the layout runs: on all ranks, or on rank 0 alone while the others wait (None there)."""
    if layout.axis is not None:
        return trace(subject, layout, world, **options)
    return on_rank_0(world, f"{key}/alone", lambda: trace(subject, layout, alone(world), **options))


def single_like(subject: Subject, layout: Layout) -> Layout:
    """The layout of one process with the mathematics of `layout`.

    With batch norm, cutting a batch into micro-batches is another mathematics: then `single` does it too.
    """
    accumulate = layout.accumulate if subject.has_batch_norm else 1
    return Layout("single", accumulate=accumulate, precision=layout.precision)


def references(subject: Subject, layout: Layout, world: World) -> list[Trace]:
    """`single` in the precision of `layout`, then perturbed. Run once for each, kept in the subject. On rank 0."""
    single = single_like(subject, layout)
    if str(single) not in subject.references:
        here = alone(world)
        runs = [trace(subject, single, here), trace(subject, single, here, reverse=True)]
        if layout.precision != "float64":
            runs += [trace(subject, single, here, jitter=seed) for seed in (1, 2, 3)]
        subject.references[str(single)] = runs
    return subject.references[str(single)]
