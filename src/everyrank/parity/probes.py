"""Find the part of a workload that is not a sum over samples: collate, loss or model.

In one process, with the initial weights, a batch is compared with the same batch in two halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from everyrank.data import (
    Batch,
    Slice,
    Streamed,
    UnevenStreams,
    Update,
    batches_for_evaluation,
    batches_for_updates,
)
from everyrank.data.seeds import seed_sample
from everyrank.layout import Layout
from everyrank.parallel.batch_gather import watch_gather
from everyrank.parity.case import ParityCase
from everyrank.parity.rows import leaves, row_values, slice_rows
from everyrank.parity.samples import sample_fingerprint
from everyrank.strategies import Prepared, prepare
from everyrank.world import World

__all__ = ["probe_evaluation", "probe_update"]

_ROUNDING = 1e-8
_NUM_SAMPLES = 8  # to read twice
_Read = Callable[[Slice], Batch]


def probe_update(case: ParityCase, world: World, update: Update) -> str | None:
    """Return a message about the part of the workload that is not a sum over this update's samples, or None.

    Also None if one device cannot hold the model.
    """
    if case.reference is not None:
        return None

    def read(data_slice: Slice) -> Batch:
        data = (case.workload, case.train_data, [update], data_slice, 1, world, torch.float64)
        return next(batches_for_updates(*data))[0]

    return _probe(case, world, read, "train", case.train_data)


def probe_evaluation(case: ParityCase, world: World) -> str | None:
    """Return a message as `probe_update` does, for the first and the last batch of the evaluation data."""
    if case.reference is not None:
        return None

    def reader(index: int) -> _Read:
        def read(data_slice: Slice) -> Batch:
            return list(batches_for_evaluation(case.workload, case.eval_ends, data_slice, world, torch.float64))[index]

        return read

    return _probe(case, world, reader(0), "eval", case.eval_ends) or _probe(
        case, world, reader(-1), "eval", case.eval_ends
    )


def _probe(case: ParityCase, world: World, read: _Read, mode: str, data: Any) -> str | None:
    whole, halves = read(Slice(0, 1)), [read(Slice(index, 2)) for index in range(2)]
    if any(half.size == 0 for half in halves):
        return None
    padding = _padding(whole, halves)
    mixing = None if padding else _mixing(whole, halves, read, lambda: _draws_by_itself(data, case.workload.seed))
    with contextlib.suppress(Exception), torch.no_grad():  # user code may not accept such small batches
        layout = Layout("single", precision="float64")
        prepared = prepare(case.workload, layout, world)
        prepared.model.train(mode == "train")
        output = prepared.predict(whole)
        cause = _loss_in_parts(case, output, whole, halves)
        if cause is not None:
            return cause
        if not case.has_batch_norm or mode == "eval":
            cause = _model_in_parts(prepared, output, whole, halves)
        if padding is not None and (cause is not None or case.has_batch_norm):
            return padding
        return mixing or cause
    return padding or mixing


def _padding(whole: Batch, halves: list[Batch]) -> str | None:
    """Return a message if collate pads the same samples to a different shape in a different batch."""
    tensors = leaves((whole.input, whole.target))
    for half in halves:
        tensors_of_half = leaves((half.input, half.target))
        if len(tensors_of_half) != len(tensors):
            continue  # a list with a tensor for each sample: the same index is another sample
        for leaf, other in zip(tensors, tensors_of_half, strict=True):
            if leaf.dim() == other.dim() > 1 and leaf.shape[1:] != other.shape[1:]:
                return (
                    f"collate pads each batch to its own longest sample ({tuple(leaf.shape[1:])} in the whole batch, "
                    f"{tuple(other.shape[1:])} in a part of it), and the padding seems to change what is "
                    "computed; pad to a fixed size, or leave the padding out of model and loss"
                )
    return None


def _mixing(whole: Batch, halves: list[Batch], read: _Read, dataset_draws: Callable[[], bool]) -> str | None:
    """Return a message if collate, or the dataset, gives the same samples different values in a different batch."""
    values = torch.cat([row_values(half) for half in halves])
    expected = row_values(whole)
    if len(values) == len(expected) and torch.allclose(values, expected, rtol=1e-9, atol=1e-9):
        return None
    values_again = row_values(read(Slice(0, 1)))
    if not torch.allclose(values_again, expected, rtol=1e-9, atol=1e-9):
        if dataset_draws():
            return (
                "the dataset gives a sample other values when it is read again: it draws from a generator of its own, "
                "or keeps state; draw from torch, numpy.random or random, which are seeded with (seed, epoch, sample)"
            )
        return (
            "collate draws random numbers, which differ between ranks; draw them in the dataset, where they are a "
            "function of (seed, epoch, sample)"
        )
    return (
        "collate mixes samples, or scales them by the batch: the values of a sample depend on the rest of "
        "its batch; do that in the dataset"
    )


def _draws_by_itself(data: Any, seed: int) -> bool:
    """Whether the first samples of a dataset differ when they are read again with the same random numbers."""
    if isinstance(data, Streamed | UnevenStreams):
        return False
    for index in range(min(_NUM_SAMPLES, len(data))):
        fingerprints: list[int] = []
        for _ in range(2):
            seed_sample(seed, 0, index)
            fingerprints.append(sample_fingerprint(data[index]))
        if fingerprints[0] != fingerprints[1]:
            return True
    return False


def _sum_and_count(case: ParityCase, output: Any, target: Any) -> tuple[float, float]:
    total, count = case.workload.loss(output, target)
    return float(total), float(count)


def _loss_in_parts(case: ParityCase, output: Any, whole: Batch, halves: list[Batch]) -> str | None:
    """Return a message if the loss of a batch is not the sum of the losses of its halves."""
    with watch_gather() as gather_calls:
        total, count = _sum_and_count(case, output, whole.target)
    if gather_calls:
        return None  # the loss uses everyrank.gather, which returns the whole batch
    parts: list[tuple[float, float]] = []
    start = 0
    for half in halves:
        rows = slice(start, start + half.size)
        # a list with tensors for each sample cannot be sliced
        is_list = len(leaves(half.target)) != len(leaves(whole.target))
        target = half.target if is_list else slice_rows(whole.target, whole.size, rows)
        parts.append(_sum_and_count(case, slice_rows(output, whole.size, rows), target))
        start += half.size
    part_sum, num_terms = sum(part_total for part_total, _ in parts), sum(part_count for _, part_count in parts)
    # losses whose terms cancel are small compared with those of the halves
    scale = max(abs(total), sum(abs(part_total) for part_total, _ in parts), 1e-300)
    if abs(part_sum - total) <= _ROUNDING * scale and abs(num_terms - count) <= 1e-6 * max(count, 1):
        return None
    total_again = _sum_and_count(case, output, whole.target)[0]
    if abs(total_again - total) > _ROUNDING * scale:
        return (
            f"the loss of the same output and target is {total:.6g}, then {total_again:.6g}: it draws random numbers, "
            "or keeps state from one call to the next"
        )
    if abs(num_terms - count) <= 1e-6 * max(count, 1) and abs(part_sum / 2 - total) < 0.1 * scale:
        return (
            f"the losses of two halves of a batch add up to {part_sum:.4g}, and the loss of the whole is {total:.4g}: "
            "it is a mean over its batch; return (sum over terms, number of terms)"
        )
    return (
        f"the loss depends on the whole batch: on the same outputs, two halves add up to {part_sum:.6g} ({num_terms:g} "
        f"terms), the whole to {total:.6g} ({count:g}); a contrastive loss, or a mean or statistic over the batch: "
        "return a sum over terms, and use everyrank.gather(x) for the rows of all ranks"
    )


def _model_in_parts(prepared: Prepared, output: Any, whole: Batch, halves: list[Batch]) -> str | None:
    """Return a message if the model's output for a sample depends on the other samples of its batch."""
    if not _is_same(output, prepared.predict(whole), slice(None), whole.size):
        return "the model draws random numbers: the same batch, run twice, gives two outputs (dropout as a function?)"
    start = 0
    for half in halves:
        rows = slice(start, start + half.size)
        if not _is_same(slice_rows(output, whole.size, rows), prepared.predict(half), slice(None), half.size):
            return (
                "the model's output for a sample depends on the rest of its batch (a statistic over the batch, "
                "or state that is kept from one call to the next)"
            )
        start += half.size
    return None


def _is_same(expected: Any, other: Any, rows: slice, size: int) -> bool:
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(leaves(expected), leaves(other), strict=False)
    for left, right in pairs:
        if not left.is_floating_point() or not left.dim() or left.shape[0] != size:
            continue
        if left.shape != right.shape:
            return False
        scale = float(left.abs().max()) if left.numel() else 0.0
        if not torch.allclose(left[rows], right[rows], rtol=0, atol=_ROUNDING * max(scale, 1e-300)):
            return False
    return True
