"""The loop: feed a prepared strategy, keep its shares, evaluate. What `train`, `verify` and `bench` have in common."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from everyrank.collectives import all_equal, gather, sum_over_ranks
from everyrank.data import (
    Batch,
    Streamed,
    Update,
    batches_for_evaluation,
    batches_for_updates,
    count_samples,
    is_stream,
    lone_sample,
    samples_per_epoch,
    updates_per_epoch,
)
from everyrank.data.parts import weights_of
from everyrank.data.seeds import mix
from everyrank.errors import EveryrankError, NotFiniteError, WorkloadError, describe
from everyrank.finite import agreed, first_bad_tensor
from everyrank.layout import Layout
from everyrank.parallel.batch_norm import refuse_lone_samples
from everyrank.parallel.build import compute_dtype
from everyrank.parallel.construct import seed_everything
from everyrank.parallel.mesh import local_tensors
from everyrank.strategies import Prepared, evaluate_batch
from everyrank.workload import Workload
from everyrank.world import World

__all__ = [
    "blame_workload",
    "evaluate",
    "mean_metrics",
    "open_data",
    "planned_updates",
    "restore",
    "run_updates",
    "snapshot",
]


@contextlib.contextmanager
def blame_workload() -> Generator[None]:
    """Turn an exception out of a person's code into a `WorkloadError` of one line. For before the first update."""
    try:
        yield
    except (EveryrankError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise WorkloadError(describe(error)) from error


def open_data(workload: Workload, world: World) -> tuple[Any, Any]:
    """The training and the evaluation data (None without). A collective.

    A stream is counted where it has no length. Raises `WorkloadError` for data that cannot be cut, or that is not the
    same length on every rank.
    """
    seed_everything(workload.seed)  # data made up at random is the same data in every rank
    with blame_workload():
        train_data: Any = workload.train_data()
        eval_data: Any = workload.eval_data() if workload.eval_data else None
    limit = workload.steps * workload.global_batch if workload.steps is not None else None
    train_data = _counted("train_data", train_data, limit, world)
    if workload.eval_data is not None:
        eval_data = _counted("eval_data", eval_data, None, world)
    if len(train_data) < world.size:
        raise WorkloadError(
            f"{world.size} ranks read, but train_data has {len(train_data)} samples; use --processes {len(train_data)}"
        )
    if workload.weights is not None:
        _check_weights(workload.weights, train_data, world)
    if not samples_per_epoch(workload, len(train_data)):
        raise WorkloadError(
            f"drop_last=True: train_data has {len(train_data)} samples, not one batch of {workload.global_batch}; "
            f"use a global_batch of at most {len(train_data)}"
        )
    return train_data, eval_data


def _check_weights(weights: Callable[[], Sequence[float]], data: Any, world: World) -> None:
    """Ranks with other weights would draw other samples, each by itself, in silence."""
    if isinstance(data, Streamed):
        raise WorkloadError(
            "weights: train_data is a stream, which comes in its own order; give a dataset with a length"
        )
    with blame_workload():
        found = weights_of(weights, len(data))
    if not all_equal([found], world):
        raise WorkloadError("weights: not the same on all ranks; make them of the data alone")


def _counted(name: str, data: Any, limit: int | None, world: World) -> Any:
    """The data, which has a length from here on: the same on every rank."""
    if isinstance(data, DataLoader):
        raise WorkloadError(f"{name}: a DataLoader; give the dataset: batches and workers are made here")
    if is_stream(data):
        try:
            with blame_workload():
                data = Streamed(data, *count_samples(data, limit, world.timeout_seconds))
        except WorkloadError as error:
            raise WorkloadError(f"{name}: {error}") from error.__cause__
    elif not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise WorkloadError(f"{name}: {kind} is no dataset; give one with __len__ and __getitem__, or with __iter__")
    try:
        own = len(data)
    except (TypeError, ValueError, OverflowError) as error:  # below zero, or more than fits
        raise WorkloadError(f"{name}: {type(data).__name__} has no length: {error}") from error
    if own == 0:
        raise WorkloadError(f"{name}: the dataset is empty")
    lengths = [int(length) for length in gather(torch.tensor([own]), world)]
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise WorkloadError(
                f"{name}: {length} samples on rank {rank} and {lengths[0]} on rank 0; "
                "return all of the data on every rank: it is divided here"
            )
    return data


def planned_updates(workload: Workload, length: int) -> int:
    """How many updates the workload's `epochs` or `steps` come to."""
    if workload.steps is not None:
        return workload.steps
    return (workload.epochs or 1) * updates_per_epoch(samples_per_epoch(workload, length), workload.global_batch)


def run_updates(
    workload: Workload,
    dataset: Any,
    layout: Layout,
    world: World,
    prepared: Prepared,
    updates: Iterable[Update],
    reverse: bool = False,
) -> Iterator[Tensor]:
    """Do the updates in order; yield this rank's share of (sum, count) after each.

    The generator is the loop: whoever takes its values decides what happens between two updates, and nothing does
    unless they say so. Raises `NotFiniteError` with the update and the first bad tensor, on every rank alike.
    """
    updates = updates if isinstance(updates, Sequence) else list(updates)
    batches = batches_for_updates(
        workload, dataset, updates, prepared.reads, prepared.micro_batches, world, compute_dtype(layout), reverse
    )
    lone = lone_sample(workload, samples_per_epoch(workload, len(dataset)), updates, prepared.micro_batches)
    return _run(workload, world, prepared, updates, batches, lone)


def _run(
    workload: Workload,
    world: World,
    prepared: Prepared,
    updates: Sequence[Update],
    batches: Iterator[list[Batch]],
    lone: str,
) -> Iterator[Tensor]:
    for place, update in enumerate(updates):
        with blame_workload() if place == 0 else contextlib.nullcontext():
            micro_batches = next(batches)
            _seed_update(workload, update, prepared, world)
            try:
                with refuse_lone_samples(prepared.model, lone if place == 0 else ""):
                    share = prepared.step(micro_batches)
                if prepared.average is not None:
                    prepared.average.follow()
            except NotFiniteError as error:
                _seed_update(workload, update, prepared, world)
                where = agreed(first_bad_tensor(workload, prepared, micro_batches, update.step), prepared)
                raise NotFiniteError(f"update {update.step}: {error}; first bad tensor: {where}") from None
            except WorkloadError as error:
                raise type(error)(f"update {update.step}: {error}") from error.__cause__
        yield share


def _seed_update(workload: Workload, update: Update, prepared: Prepared, world: World) -> None:
    """Make dropout a function of (seed, step, rank); ranks that compute on the same activations draw the same."""
    seed = mix(workload.seed, update.step, prepared.mesh.draws)
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def evaluate(
    workload: Workload, dataset: Any, layout: Layout, world: World, prepared: Prepared
) -> dict[str, tuple[float, float]]:
    """Exact (sum, count) over all ranks of the loss and each metric. Every sample counts once. A collective."""
    shares = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    prepared.model.eval()
    with torch.no_grad(), prepared.averaged():
        for batch in batches_for_evaluation(workload, dataset, prepared.reads, world, compute_dtype(layout)):
            output = prepared.predict(batch)
            if prepared.speaks:
                shares += evaluate_batch(workload, output, batch, prepared.mesh)
    prepared.model.train()
    total = sum_over_ranks(shares, prepared.mesh.world)
    names = ["loss", *workload.metrics]
    return {name: (float(total[row, 0]), float(total[row, 1])) for row, name in enumerate(names)}


def snapshot(prepared: Prepared) -> dict[str, Any]:
    """A copy of all that training changes in this rank."""
    tensors = [*prepared.model.parameters(), *prepared.model.buffers()]
    return {
        "tensors": [tensor.detach().clone() for tensor in local_tensors(list(tensors))],
        "average": [own.clone() for own in local_tensors(prepared.average.tensors)] if prepared.average else [],
        "optimizer": copy.deepcopy(prepared.optimizer.state_dict()),
        "schedule": copy.deepcopy(prepared.schedule.state_dict()) if prepared.schedule else None,
        "scale": dataclasses.replace(prepared.scale) if prepared.scale else None,
    }


@torch.no_grad()
def restore(prepared: Prepared, saved: dict[str, Any]) -> None:
    """Put the copy back."""
    tensors = local_tensors([*prepared.model.parameters(), *prepared.model.buffers()])
    for tensor, copied in zip(tensors, saved["tensors"], strict=True):
        tensor.copy_(copied)
    if prepared.average is not None:
        for tensor, copied in zip(local_tensors(prepared.average.tensors), saved["average"], strict=True):
            tensor.copy_(copied)
    prepared.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    if prepared.schedule is not None:
        prepared.schedule.load_state_dict(copy.deepcopy(saved["schedule"]))
    if prepared.scale is not None:
        prepared.scale.scale, prepared.scale.good_steps = saved["scale"].scale, saved["scale"].good_steps


def mean_metrics(workload: Workload, metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The mean of each exact sum, and what the workload derives of them; that of the loss is called eval_loss.

    A name that begins with an underscore is for `derived` alone, and not handed on.
    """
    means = {name: total / count for name, (total, count) in metrics.items() if count}
    named = {("eval_loss" if name == "loss" else name): value for name, value in means.items()}
    with blame_workload():
        found = named | {name: float(derive(named)) for name, derive in workload.derived.items()}
    return {name: value for name, value in found.items() if not name.startswith("_")}
