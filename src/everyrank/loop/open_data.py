"""Loads the data of a workload, with a length that all ranks agree on, and wraps errors of user code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from everyrank.data import (
    Slice,
    Streamed,
    UnevenStreams,
    count_samples,
    count_streams,
    cut,
    find_streams,
    is_stream,
    samples_per_epoch,
)
from everyrank.data.parts import weights_of
from everyrank.errors import EveryrankError, WorkloadError, describe
from everyrank.parallel.init_model import seed_everything
from everyrank.workload import Workload
from everyrank.world import World
from everyrank.world.collectives import all_equal, all_gather

__all__ = ["open_data", "wrap_user_errors"]


@contextlib.contextmanager
def wrap_user_errors() -> Generator[None]:
    """Turn an exception of user code into a `WorkloadError` of one line, until the first update is done."""
    try:
        yield
    except (EveryrankError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise WorkloadError(describe(error)) from error


def open_data(workload: Workload, world: World, counts_uneven: bool = True) -> tuple[Any, Any]:
    """Return the training data and the evaluation data (None without). A collective.

    Counts the samples of a stream without a length. Streams that are each read by one rank (order="shard") are
    counted only if `counts_uneven`. Raises `WorkloadError` for data that cannot be split, or whose length differs
    between ranks.
    """
    _check_metric_names(workload)
    seed_everything(workload.seed)  # random data is equal on all ranks
    with wrap_user_errors():
        train_data: Any = workload.train_data()
        eval_data: Any = workload.eval_data() if workload.eval_data else None
    streams = find_streams(train_data) if workload.order == "shard" else None
    if streams is not None:
        train_data = _open_uneven(workload, train_data, streams, world, counts_uneven)
    else:
        limit = workload.steps * workload.global_batch if workload.steps is not None else None
        train_data = _with_length("train_data", train_data, limit, world)
    if workload.eval_data is not None:
        eval_data = _with_length("eval_data", eval_data, None, world)
    if streams is not None:
        return train_data, eval_data
    if len(train_data) < world.size:
        raise WorkloadError(
            f"{world.size} ranks read, but train_data has {len(train_data)} samples; use --processes {len(train_data)}"
        )
    if workload.weights is not None:
        _check_weights(workload.weights, train_data, world)
    if not samples_per_epoch(workload, len(train_data)):
        raise WorkloadError(
            f"drop_last=True: train_data has {len(train_data)} samples, less than a batch of {workload.global_batch}; "
            f"use a global_batch of at most {len(train_data)}"
        )
    return train_data, eval_data


def _open_uneven(
    workload: Workload, dataset: Any, streams: Sequence[Any], world: World, is_counted: bool
) -> UnevenStreams:
    """Return the streams, each read by one rank. Every rank counts the samples of some streams. A collective."""
    counts = [int(count) for count in all_gather(torch.tensor([len(streams)]), world)]
    if len(set(counts)) > 1:
        raise WorkloadError(f"train_data: {counts} streams on the ranks; give all streams on every rank")
    data = UnevenStreams(dataset, streams, None, is_whole=True)
    data.check_readers(Slice(0, 1), workload.global_batch)
    if not is_counted:
        return data
    local_range = cut(len(streams), Slice(world.rank, world.size))
    with wrap_user_errors():
        takes = data.takes(workload.global_batch)
        rows = count_streams(streams, local_range, takes, workload.steps, world.timeout_seconds)
    # each rank counts a contiguous range, which may be empty
    gathered = torch.cat(all_gather(torch.tensor(rows, dtype=torch.int64).flatten(), world)).view(-1, 2).tolist()
    data.lengths, data.is_whole = [length for length, _ in gathered], all(is_whole for _, is_whole in gathered)
    if not data.epoch(workload).updates:
        raise WorkloadError(
            f"train_data: streams of {data.lengths} samples have no update (drop_last={workload.drop_last})"
        )
    return data


def _check_metric_names(workload: Workload) -> None:
    """Raise `WorkloadError` for a metric whose value would replace the loss of the evaluation or another metric."""
    loss_names = {"loss", "eval_loss"}
    for field, names, taken in (
        ("metrics", workload.metrics, loss_names),
        ("derived", workload.derived, loss_names | workload.metrics.keys()),
    ):
        for name in (name for name in names if name in taken):
            owner = "the loss on eval_data (eval_loss)" if name in loss_names else "one of metrics"
            raise WorkloadError(
                f"workload {workload.name}: {field}: the name {name!r} is that of {owner}; give another"
            )


def _check_weights(weights: Callable[[], Sequence[float]], data: Any, world: World) -> None:
    """Raise `WorkloadError` for sample weights that differ between ranks, which would then draw different samples."""
    if isinstance(data, Streamed):
        raise WorkloadError("weights: train_data is a stream, whose order is fixed; give a dataset with a length")
    with wrap_user_errors():
        sample_weights = weights_of(weights, len(data))
    if not all_equal([sample_weights], world):
        raise WorkloadError("weights: not the same on all ranks; compute them from the data only")


def _with_length(name: str, data: Any, limit: int | None, world: World) -> Any:
    """Return the data with a length that is the same on every rank."""
    if isinstance(data, DataLoader):
        raise WorkloadError(f"{name}: a DataLoader; give its dataset: everyrank makes the batches and the workers")
    if is_stream(data):
        try:
            with wrap_user_errors():
                data = Streamed(data, *count_samples(data, limit, world.timeout_seconds))
        except WorkloadError as error:
            raise WorkloadError(f"{name}: {error}") from error.__cause__
    elif not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise WorkloadError(f"{name}: {kind} is not a dataset; give one with __len__ and __getitem__, or with __iter__")
    try:
        local_length = len(data)
    except (TypeError, ValueError, OverflowError) as error:  # negative or too large
        raise WorkloadError(f"{name}: {type(data).__name__} has no length: {error}") from error
    if local_length == 0:
        raise WorkloadError(f"{name}: the dataset is empty")
    lengths = [int(length) for length in all_gather(torch.tensor([local_length]), world)]
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise WorkloadError(
                f"{name}: {length} samples on rank {rank} and {lengths[0]} on rank 0; "
                "return all of the data on every rank: everyrank divides it"
            )
    return data
