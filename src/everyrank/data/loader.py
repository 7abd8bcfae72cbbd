"""Iterate over the batches of one rank on its device, with random numbers seeded per sample.

parts.py decides *which* samples are read.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from everyrank.data.fetch import Batch, fetch_all, map_tensors, move, pair_of
from everyrank.data.order import Update
from everyrank.data.parts import Keys, Part, parts_for_evaluation, parts_for_updates
from everyrank.data.seeds import seed_sample
from everyrank.data.slicing import Slice
from everyrank.data.stream import Streamed, StreamReader
from everyrank.data.uneven import UnevenStreams
from everyrank.data.uneven_updates import uneven_batches
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Batch", "batches_for_evaluation", "batches_for_updates", "map_tensors"]


def batches_for_updates(
    workload: Workload,
    dataset: Any,
    updates: Iterable[Update],
    reads: Slice,
    accumulate: int,
    world: World,
    dtype: torch.dtype,
    reverse: bool = False,
) -> Iterator[list[Batch]]:
    """For each update, yield this rank's part of each micro-batch; [] for a rank that reads nothing.

    `reverse` reverses the samples within each micro-batch. Only the order of addition changes, which is how parity
    measures rounding errors.
    """
    if not reads.count:
        return ([] for _ in updates)
    if isinstance(dataset, UnevenStreams):
        return uneven_batches(workload, dataset, updates, reads, accumulate, world, dtype, reverse)
    parts = parts_for_updates(workload, dataset, updates, reads, accumulate, reverse)
    return _fetch(workload, dataset, parts, world, dtype, "train_data")


def batches_for_evaluation(
    workload: Workload, dataset: Any, reads: Slice, world: World, dtype: torch.dtype, data_name: str = "eval_data"
) -> Iterator[Batch]:
    """Yield the rank's part of each evaluation batch, in order: the same number on every rank that reads.

    `data_name` is the field of the workload that `dataset` is of, for messages.
    """
    if not reads.count:
        return iter(())
    dataset = dataset.whole() if isinstance(dataset, UnevenStreams) else dataset
    parts = parts_for_evaluation(workload, dataset, reads)
    return (batches[0] for batches in _fetch(workload, dataset, parts, world, dtype, data_name))


def _fetch(
    workload: Workload, dataset: Any, updates: Iterator[list[Part]], world: World, dtype: torch.dtype, data_name: str
) -> Iterator[list[Batch]]:
    """Fetch the parts of each update, in order, onto this rank's device."""
    # The loader's workers ask for parts ahead of the loop, so their sizes are queued here until the data arrives.
    pending: collections.deque[list[Part]] = collections.deque()

    def keys() -> Iterator[Keys]:
        for parts in updates:
            pending.append(parts)
            for micro_batch in parts:
                yield micro_batch.keys

    takes_rows = _is_tensor_dataset(dataset) and workload.collate is None
    reader: Any = _Rows(dataset) if takes_rows else _ByKey(dataset, workload.seed)
    if isinstance(dataset, Streamed):
        reader = StreamReader(dataset, workload.seed)
    collate: Callable[[Any], Any] = _identity if takes_rows else workload.collate or default_collate
    fetched = fetch_all(reader, collate, keys(), world)
    pairs = (pair_of(content, data_name, workload.collate is not None) for content in fetched)
    return _batches(pairs, pending, functools.partial(move, device=world.device, dtype=dtype))


def _batches(
    fetched: Iterator[tuple[Any, Any]],
    pending: collections.deque[list[Part]],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[list[Batch]]:
    """Group the fetched micro-batches by update."""
    while True:
        batches: list[Batch] = []
        for value, target in fetched:
            micro_batch = pending[0][len(batches)]
            batches.append(
                Batch(
                    map_tensors(value, change),
                    map_tensors(target, change),
                    micro_batch.size,
                    micro_batch.start,
                    micro_batch.total,
                    len(pending[0]),
                    micro_batch.sample_indices,
                )
            )
            if len(batches) == len(pending[0]):
                break
        if not batches:
            return
        pending.popleft()
        yield batches


def _is_tensor_dataset(dataset: Any) -> bool:
    """Whether a sample is just a row of some tensors; a subclass of TensorDataset may do more."""
    if not isinstance(dataset, TensorDataset) or hasattr(type(dataset), "__getitems__"):
        return False
    return type(dataset).__getitem__ is TensorDataset.__getitem__


class _Rows(Dataset[Any]):
    """A TensorDataset read by `Keys`: one indexing operation per batch instead of rows that are collated."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.tensors = dataset.tensors

    def __getitems__(self, keys: Keys) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[keys.samples] for tensor in self.tensors)


def _identity(batch: Any) -> Any:
    return batch


class _ByKey(Dataset[Any]):
    """A dataset read by `Keys`, whose randomness is a function of (seed, epoch, sample)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.fetch_all: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self.is_random = not (_is_tensor_dataset(dataset) or getattr(dataset, "deterministic", False))

    def __getitems__(self, keys: Keys) -> list[Any]:
        if self.is_random:
            return [self._seeded(keys.epoch, sample) for sample in keys.samples]
        if self.fetch_all is not None:
            return self.fetch_all(keys.samples)
        return [self.dataset[sample] for sample in keys.samples]

    def _seeded(self, epoch: int, sample: int) -> Any:
        seed_sample(self.seed, epoch, sample)
        return self.dataset[sample]
