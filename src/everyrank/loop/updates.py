"""run_updates: the training loop as a generator."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.data import (
    Batch,
    UnevenStreams,
    Update,
    batch_of_one,
    batches_for_updates,
    samples_per_epoch,
)
from everyrank.data.seeds import mix
from everyrank.errors import NotFiniteError, UnsupportedLayoutError, WorkloadError
from everyrank.loop.finite import first_bad_tensor, first_of_all_ranks
from everyrank.loop.open_data import wrap_user_errors
from everyrank.parallel.batch_norm import refuse_batch_of_one
from everyrank.strategies import Prepared
from everyrank.world import end_of_start

__all__ = ["run_updates"]


def run_updates(
    prepared: Prepared,
    dataset: Any,
    updates: Iterable[Update],
    reverse: bool = False,
    fetched: Callable[[float], None] | None = None,
) -> Iterator[Tensor]:
    """Run the updates in order; yield this rank's loss (sum, count), float64, shape (2,), after each.

    The caller decides what happens between two updates. `reverse` reverses the samples of each micro-batch.
    `fetched(seconds)` is called with the loading time of each update. Raises `NotFiniteError` on every rank, with the
    update and the first bad tensor.
    """
    updates = list(updates) if isinstance(updates, Iterator) else updates  # they are iterated twice
    workload = prepared.workload
    if isinstance(dataset, UnevenStreams) and prepared.mesh.servers:
        raise UnsupportedLayoutError(
            f"layout {prepared.layout}: uneven streams are not supported, because servers read no data; use ddp"
        )
    batches_by_rank = [
        batches_for_updates(
            workload,
            dataset,
            updates,
            data_slice,
            prepared.num_micro_batches,
            prepared.world,
            prepared.dtype,
            reverse,
        )
        for data_slice in prepared.data_slices
    ]
    batches = (list(itertools.chain.from_iterable(micro_batch)) for micro_batch in zip(*batches_by_rank, strict=True))
    batch_of_one_message = ""
    if isinstance(updates, Sequence) and not isinstance(dataset, UnevenStreams):
        batch_of_one_message = batch_of_one(
            workload, samples_per_epoch(workload, len(dataset)), updates, prepared.num_micro_batches
        )
    return _run(prepared, updates, batches, batch_of_one_message, fetched)


def _run(
    prepared: Prepared,
    updates: Iterable[Update],
    batches: Iterator[list[Batch]],
    batch_of_one_message: str,
    fetched: Callable[[float], None] | None,
) -> Iterator[Tensor]:
    remaining_updates = iter(updates)
    for index in itertools.count():
        with wrap_user_errors() if index == 0 else contextlib.nullcontext():
            start = time.perf_counter()
            micro_batches = next(batches, None)
            if micro_batches is None:
                return
            if fetched is not None:
                fetched(time.perf_counter() - start)
            update = next(remaining_updates)
            _seed_update(prepared, update)
            try:
                with (
                    refuse_batch_of_one(prepared.model, batch_of_one_message)
                    if batch_of_one_message and index == 0
                    else contextlib.nullcontext()
                ):
                    share = prepared.step(micro_batches)
                if prepared.trainable.ema is not None:
                    prepared.trainable.ema.update()
            except NotFiniteError as error:
                _seed_update(prepared, update)
                where = first_of_all_ranks(first_bad_tensor(prepared, micro_batches, update.step), prepared)
                raise NotFiniteError(f"update {update.step}: {error}; first bad tensor: {where}") from None
            except WorkloadError as error:
                raise type(error)(f"update {update.step}: {error}") from error.__cause__
        yield share
        if index == 0:  # the first update is done: the usual timeout holds from here on
            end_of_start(prepared.world)


def _seed_update(prepared: Prepared, update: Update) -> None:
    """Seed torch's generators with (seed, step, rank); ranks with the same activations get the same seed.

    Exact dropout, which is equal in all layouts, uses the number of the update only.
    """
    if prepared.parallel.dropout is not None:
        prepared.parallel.dropout.step = update.step
    seed = mix(prepared.workload.seed, update.step, prepared.mesh.rng_stream)
    torch.default_generator.manual_seed(seed)
    if prepared.world.device.type == "cuda":
        torch.cuda.manual_seed(seed)
