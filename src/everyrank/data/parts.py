"""The samples that a rank reads for each micro-batch: the order is split into updates, then over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everyrank.data.order import Update, drawn_order, epoch_order, sample_numbers, shard_order, update_samples
from everyrank.data.slicing import Slice, cut, micro_batches
from everyrank.data.stream import Streamed
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

__all__ = ["Keys", "Part", "order_of", "parts_for_evaluation", "parts_for_updates", "weights_of"]


class Keys(NamedTuple):
    """The samples of one epoch that the loader fetches together."""

    epoch: int
    samples: list[int]


class Part(NamedTuple):
    """The keys to fetch for one `Batch`, and its size and position."""

    keys: Keys
    size: int
    start: int
    total: int
    is_reversed: bool = False

    @property
    def sample_indices(self) -> range:
        """Index of each sample in the update, in reading order; for a dummy sample the index `start`."""
        sample_indices = range(self.start, self.start + max(self.size, 1))
        return sample_indices[::-1] if self.is_reversed else sample_indices


def parts_for_updates(
    workload: Workload, dataset: Any, updates: Iterable[Update], reads: Slice, accumulate: int, reverse: bool
) -> Iterator[list[Part]]:
    """For each update, yield the rank's part of each micro-batch. Raises `WorkloadError` for unusable `shard_sizes`."""
    if workload.order == "shard":
        yield from _by_shard(workload, dataset, updates, reads, accumulate, reverse)
        return
    order: Tensor | range = range(0)
    epoch = -1
    for update in updates:
        if update.epoch != epoch:
            order, epoch = order_of(workload, dataset, update.epoch), update.epoch
        samples = update_samples(order, workload.global_batch, update.index)
        micro = micro_batches(len(samples), accumulate)
        yield [_part(samples, positions, reads, update.epoch, reverse) for positions in micro]


def parts_for_evaluation(workload: Workload, dataset: Any, reads: Slice) -> Iterator[list[Part]]:
    """Yield the rank's part of each evaluation batch, in order: the same number on every rank."""
    length, batch = len(dataset), workload.eval_batch or workload.global_batch
    for start in range(0, length, batch):
        samples = range(start, min(start + batch, length))
        yield [_part(samples, range(len(samples)), reads, 0, reverse=False)]


def order_of(workload: Workload, dataset: Any, epoch: int) -> Tensor | range:
    """Return the sample order of an epoch under order="global". A stream keeps its own order."""
    if workload.weights is not None:
        return drawn_order(weights_of(workload.weights, len(dataset)), workload.seed, epoch)
    return range(len(dataset)) if isinstance(dataset, Streamed) else epoch_order(len(dataset), workload.seed, epoch)


_MAX_WEIGHTS = 1 << 24  # the limit of torch.multinomial


def weights_of(weights: Callable[[], Sequence[float]], length: int) -> Tensor:
    """Return the weight of each training sample, float64, (length,), cached. Raises `WorkloadError`."""
    return _cached_weights(_ByIdentity(weights), length)


class _ByIdentity:
    """A key of a cache for a callable object that may not be hashable, such as a dataclass with `__call__`."""

    def __init__(self, function: Callable[[], Sequence[float]]) -> None:
        self.function = function

    def __hash__(self) -> int:
        return id(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.function is other.function


@functools.lru_cache(maxsize=4)
def _cached_weights(weights: _ByIdentity, length: int) -> Tensor:
    values = torch.as_tensor(weights.function(), dtype=torch.float64).cpu()
    if values.shape != (length,):
        raise WorkloadError(f"weights: shape {tuple(values.shape)} for {length} training samples; give one for each")
    if not bool(((values >= 0) & values.isfinite()).all()) or not float(values.sum()) > 0:
        raise WorkloadError("weights: give finite numbers of at least 0, not all of them 0")
    if length > _MAX_WEIGHTS:
        raise WorkloadError(f"weights: {length:,} samples; torch draws from at most {_MAX_WEIGHTS:,}")
    return values


def _part(samples: Sequence[int], positions: range, reads: Slice, epoch: int, reverse: bool) -> Part:
    local = cut(len(positions), reads)
    chosen = list(samples[positions.start + local.start : positions.start + local.stop])
    if reverse:
        chosen.reverse()
    padding = chosen or [samples[positions[0]]]
    return Part(Keys(epoch, padding), len(chosen), positions.start + local.start, len(samples), reverse)


def _by_shard(
    workload: Workload, dataset: Any, updates: Iterable[Update], reads: Slice, accumulate: int, reverse: bool
) -> Iterator[list[Part]]:
    """Yield parts under order="shard": each rank reads one contiguous range of the shuffled, concatenated shards.

    The ranges differ by at most one sample, whatever the number and lengths of the shards. Each update takes samples
    from every range so that the global batch stays the same, and all ranks finish an epoch in the same update. Each
    micro-batch has a sample on some rank.
    """
    sizes: Sequence[int] | None = getattr(dataset, "shard_sizes", None)
    if sizes is None or sum(sizes) != len(dataset):
        raise WorkloadError(
            "order='shard': train_data needs shard_sizes, the number of samples in each file (their sum is its length)"
        )
    order: Tensor | range = range(0)
    epoch = -1
    local = cut(len(dataset), reads)
    for update in updates:
        if update.epoch != epoch:
            order, epoch = shard_order(sizes, workload.seed, update.epoch), update.epoch
        samples_before, samples_after = (
            min(number * workload.global_batch, len(dataset)) for number in (update.index, update.index + 1)
        )
        first, stop = len(cut(samples_before, reads)), len(cut(samples_after, reads))
        samples = sample_numbers(order[local.start + first : local.start + stop])
        most_samples = -(-(samples_after - samples_before) // reads.count)  # of any rank
        micro = [cut(len(samples), Slice(index, accumulate)) for index in range(min(most_samples, accumulate))]
        padding_index = min(local.start, len(order) - 1)
        padding = sample_numbers(order[padding_index : padding_index + 1])
        # the index that this part would have in the global batch if the batch were split over ranks
        start = cut(samples_after, reads).start - cut(samples_before, reads).start
        yield [
            Part(
                Keys(update.epoch, samples[positions.start : positions.stop][:: -1 if reverse else 1] or padding),
                len(positions),
                start + positions.start,
                samples_after - samples_before,
                reverse,
            )
            for positions in micro
        ]
