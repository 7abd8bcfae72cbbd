"""Streams of unknown, different lengths, each of which is read by one rank.

The workload fixes the streams. Update i takes the next samples of each stream that has not ended, until all have ended.
The streams are divided over the ranks. So the samples of an update depend only on the streams: three streams on one,
two or three ranks give the same training.

    stream 0   ■■■■ ■■■■ ■■■■ ■■■■ ■■         an update is a column: 12 samples, later 8, 4 and 2,
    stream 1   ■■■■ ■■■■ ■■■■                 divided by their number
    stream 2   ■■■■ ■

A rank whose streams have ended continues with dummy samples of weight zero, so that all ranks call the same
collectives. A gather of a few numbers, which overlaps with the previous update, tells all ranks how many samples each
has in an update. If no rank has any, the epoch has ended.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from everyrank.data.order import Epoch, samples_per_epoch
from everyrank.data.slicing import Slice, cut
from everyrank.data.stream import ForwardReader, Streamed, count_samples
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

__all__ = [
    "NOTHING",
    "UnevenKeys",
    "UnevenReader",
    "UnevenStreams",
    "count_streams",
    "epoch_of",
    "find_streams",
    "is_uncounted",
]


class UnevenStreams:
    """The streams of a workload, and their lengths if they have been counted, else None.

    An endless stream counts as long as the training (then `is_whole` is False).
    """

    def __init__(self, dataset: Any, streams: Sequence[Any], lengths: Sequence[int] | None, is_whole: bool) -> None:
        self.dataset, self.streams, self.lengths, self.is_whole = dataset, list(streams), lengths, is_whole

    def __len__(self) -> int:
        assert self.lengths is not None, "these streams have not been counted"
        return sum(self.lengths)

    @property
    def checksum(self) -> str | None:
        """The checksum of the dataset, if it has one."""
        return getattr(self.dataset, "checksum", None)

    def takes(self, global_batch: int) -> list[int]:
        """Return the number of samples that an update takes from each stream; they differ by at most one."""
        return [len(cut(global_batch, Slice(number, len(self.streams)))) for number in range(len(self.streams))]

    def epoch(self, workload: Workload) -> Epoch:
        """Return how an epoch of counted streams is divided into updates."""
        assert self.lengths is not None, "these streams have not been counted"
        parts = list(zip(self.lengths, self.takes(workload.global_batch), strict=True))
        if workload.drop_last:  # the epoch ends before the first update with an incomplete part
            full = min(length // batch for length, batch in parts)
            parts = [(full * batch, batch) for _, batch in parts]
        return Epoch(tuple(parts))

    def whole(self) -> Streamed:
        """Return all streams, one after the other, as one stream."""
        return Streamed(_Chain(self.streams), len(self), self.is_whole)

    def check_readers(self, reads: Slice, global_batch: int) -> None:
        """Raise `WorkloadError` for more readers than streams, and for more streams than samples of an update."""
        count = len(self.streams)
        if reads.count > count:
            raise WorkloadError(
                f"order='shard': {reads.count} ranks read, but train_data has {count} streams; use --processes {count}"
            )
        if global_batch < count:
            raise WorkloadError(
                f"order='shard': a global_batch of {global_batch} has no sample for some of the {count} streams; use "
                f"at least {count}, or chain some streams"
            )


def is_uncounted(dataset: Any) -> bool:
    """Whether the number of samples of an epoch is unknown."""
    return isinstance(dataset, UnevenStreams) and dataset.lengths is None


def epoch_of(workload: Workload, dataset: Any) -> Epoch:
    """Return how an epoch of a dataset of known length is divided into updates."""
    if isinstance(dataset, UnevenStreams):
        return dataset.epoch(workload)
    return Epoch(((samples_per_epoch(workload, len(dataset)), workload.global_batch),))


class _Chain:
    """Streams one after the other."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self.streams = streams
        self.deterministic = all(getattr(stream, "deterministic", False) for stream in streams)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the streams that have it."""
        for stream in self.streams:
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for stream in self.streams:
            decode = getattr(stream, "decode", None)
            yield from stream if decode is None else map(decode, stream)


def find_streams(dataset: Any) -> Sequence[Any] | None:
    """Return the streams that order="shard" reads; None for a dataset without streams. Raises `WorkloadError`."""
    streams: Any = getattr(dataset, "streams", None)
    if streams is None:
        return None
    if not isinstance(streams, list | tuple) or not streams:
        raise WorkloadError(f"streams={streams!r}: give a list of datasets that can be iterated, one for each rank")
    for number, stream in enumerate(streams):
        if not hasattr(stream, "__iter__") or isinstance(stream, Iterator):
            advice = "a generator can be used only once; give" if isinstance(stream, Iterator) else "give"
            kind = type(stream).__name__
            raise WorkloadError(f"streams[{number}] ({kind}): {advice} an object whose __iter__ starts again")
    return streams


def count_streams(
    streams: Sequence[Any], local: range, takes: Sequence[int], steps: int | None, patience_seconds: float
) -> list[tuple[int, int]]:
    """Return (samples of an epoch, whether the stream ends) for each local stream; an endless one counts to `steps`."""
    limits = [takes[number] * steps if steps is not None else None for number in local]
    return [
        count_samples(streams[number], limit, patience_seconds) for number, limit in zip(local, limits, strict=True)
    ]


NOTHING = -1
"""Replaces the number of samples if the streams of a rank are empty."""


class UnevenKeys(NamedTuple):
    """The key of one fetch: a micro-batch of an update, from all streams of this rank."""

    epoch: int
    update: int
    micro_batch: int


class UnevenReader(Dataset[Any]):
    """The streams of one rank, read by `UnevenKeys`, which increase within an epoch.

    Returns (number of samples, list of samples, their indices in the update). If there are none, the list holds one
    dummy sample: the newest one, or the first one of the epoch. If the streams are empty, the number is NOTHING.
    """

    def __init__(
        self, data: UnevenStreams, workload: Workload, reads: Slice, accumulate: int, reverse: bool = False
    ) -> None:
        takes, count = data.takes(workload.global_batch), len(data.streams)
        self.readers = {
            number: ForwardReader(data.streams[number], workload.seed, number, count) for number in cut(count, reads)
        }
        self.takes, self.accumulate, self.reverse = takes, accumulate, reverse
        # which micro-batches get the odd samples of a stream, so that they differ by at most one in a full update
        odd = [0, *itertools.accumulate(take % accumulate for take in takes)]
        self.shifts = [total % accumulate for total in odd]
        self.newest: tuple[ForwardReader, Any, int] | None = None

    def __getitems__(self, keys: UnevenKeys) -> tuple[int, list[Any], list[int]]:
        pairs = [pair for number in self.readers for pair in self._samples(number, keys)]
        if pairs:
            samples, sample_indices = zip(*pairs[:: -1 if self.reverse else 1], strict=True)
            return len(pairs), list(samples), list(sample_indices)
        dummy = self.newest or self._first_item()
        if dummy is None:
            return NOTHING, [], []
        reader, item, position = dummy
        return 0, [reader.decoded(item, position)], [0]

    def _first_item(self) -> tuple[ForwardReader, Any, int] | None:
        """Return the next item of the first stream that has one, without consuming it; None for empty streams."""
        for reader in self.readers.values():
            with contextlib.suppress(StopIteration):
                return reader, reader.peek(), reader.position
        return None

    def _samples(self, number: int, keys: UnevenKeys) -> list[tuple[Any, int]]:
        """Return the samples of a stream for a micro-batch, with their indices in the update; fewer at its end."""
        reader, positions = self.readers[number], self._positions(number, keys)
        if keys.epoch != reader.epoch or positions.start < reader.position:
            reader.restart(keys.epoch)
        result: list[tuple[Any, int]] = []
        update_start = keys.update * self.takes[number]
        while reader.position < positions.stop:
            position = reader.position
            try:
                item = reader.next()
            except StopIteration:
                break
            self.newest = (reader, item, position)
            if position >= positions.start:
                # the index depends on stream and position, not on the micro-batch
                result.append((reader.decoded(item, position), (position - update_start) * len(self.takes) + number))
        return result

    def _positions(self, number: int, keys: UnevenKeys) -> range:
        """Return the positions in a stream of the samples of a micro-batch."""
        size, odd = divmod(self.takes[number], self.accumulate)
        sizes = [size + ((index - self.shifts[number]) % self.accumulate < odd) for index in range(self.accumulate)]
        start = keys.update * self.takes[number] + sum(sizes[: keys.micro_batch])
        return range(start, start + sizes[keys.micro_batch])
