"""Iterable datasets: every reader iterates over the whole stream and keeps its own samples.

Sample i of an epoch belongs to update i // global_batch, whatever the ranks and loader workers. The cost is reading,
not decoding: if a stream has a method `decode(item)`, each reader calls it only for its own items.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker

from everyrank.data.seeds import seed_sample
from everyrank.errors import WorkloadError

__all__ = ["ForwardReader", "StreamReader", "Streamed", "count_samples", "is_stream"]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    if isinstance(dataset, IterableDataset):  # its inherited __getitem__ only raises an error
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


class Streamed:
    """An iterable dataset with the number of samples in an epoch.

    is_whole   whether the stream ends after `length` samples; an endless one is truncated at the end of the training
    """

    def __init__(self, dataset: Any, length: int, is_whole: bool) -> None:
        self.dataset, self.length, self.is_whole = dataset, length, is_whole

    @property
    def checksum(self) -> str | None:
        """The checksum of the stream, if it has one."""
        return getattr(self.dataset, "checksum", None)

    def __len__(self) -> int:
        return self.length


def count_samples(dataset: Any, limit: int | None, patience_seconds: float) -> tuple[int, bool]:
    """Return (samples of an epoch, whether the stream ends there), by `__len__` or by iterating once.

    Counting stops at `limit`. A stream with `endless = True` is not counted. Raises `WorkloadError` for a stream that
    does not end, or that can be iterated only once.
    """
    if hasattr(dataset, "__len__"):
        return len(dataset), True
    if isinstance(dataset, Iterator):
        raise WorkloadError(
            "a generator can be used only once; give an object whose __iter__ starts again, or one with __len__"
        )
    if getattr(dataset, "endless", False):
        if limit is None:
            raise WorkloadError("the stream is endless; give Workload.steps")
        return limit, False
    deadline = time.monotonic() + patience_seconds
    count = 0
    for _ in _items(dataset, 0):
        if count == limit:
            return count, False
        count += 1
        if time.monotonic() > deadline:
            fix = "give Workload.steps, or" if limit is None else f"{limit:,} are needed; give"
            raise WorkloadError(
                f"{count:,} samples counted in {patience_seconds:g} s, and the stream has not ended; {fix} the dataset "
                "a __len__, or endless = True"
            )
    return count, True


def _items(dataset: Any, epoch: int) -> Iterator[Any]:
    """Iterate over the items of an epoch, after `set_epoch` if the dataset has it."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return iter(dataset)


def _hide_worker_info() -> None:
    """Hide the loader worker from a stream: many streams divide themselves by worker, but each reader needs all.

    torch has no public API for this. Otherwise such a stream would end too early, and the training would fail.
    """
    if getattr(worker, "_worker_info", None) is not None:
        worker._worker_info = None  # pyright: ignore[reportPrivateUsage]


class ForwardReader:
    """Read a stream forward, one epoch after the other.

    Random numbers in `decode` (or in the stream itself if it has no `decode`) are seeded by (seed, epoch, sample
    number). The number is `first` + `stride` * position, so that several streams have different numbers.
    """

    def __init__(self, dataset: Any, seed: int, first: int = 0, stride: int = 1) -> None:
        self.dataset, self.seed, self.first, self.stride = dataset, seed, first, stride
        self.decode: Any = getattr(dataset, "decode", None)
        self.is_random = not getattr(dataset, "deterministic", False)
        # the check of the samples compares epochs, so its streams use the same seeds in every epoch
        self.same_draws_every_epoch = getattr(dataset, "same_draws_every_epoch", False)
        self.epoch = -1
        self.position = 0  # of the next item
        self.items: Iterator[Any] = iter(())
        self.peeked: list[Any] = []  # the next item, if `peek` has read it

    def restart(self, epoch: int) -> None:
        """Go back to the first item of this epoch."""
        self.epoch, self.position, self.peeked = epoch, 0, []
        self._seed(-1)
        _hide_worker_info()
        self.items = _items(self.dataset, epoch)

    def next(self) -> Any:
        """Return the next item. Raises `StopIteration` at the end."""
        item = self.peek()
        self.peeked = []
        self.position += 1
        return item

    def peek(self) -> Any:
        """Return the next item, which `next` returns again. Raises `StopIteration` at the end."""
        if not self.peeked:
            # a stream without `decode` draws random numbers in `__iter__`: each reader has to draw the same
            if self.is_random and self.decode is None:
                self._seed(self.position)
            self.peeked = [next(self.items)]
        return self.peeked[0]

    def has_more(self) -> bool:
        """Consume the next item; return whether there was one."""
        missing = object()
        return bool(self.peeked) or next(self.items, missing) is not missing

    def decoded(self, item: Any, position: int) -> Any:
        """Decode an item into a sample."""
        if self.decode is None:
            return item
        if self.is_random:
            self._seed(position)
        return self.decode(item)

    def _seed(self, position: int) -> None:
        seed_sample(self.seed, 0 if self.same_draws_every_epoch else self.epoch, self.first + self.stride * position)


class StreamReader(Dataset[Any]):
    """A stream read by `Keys`, whose sample numbers increase within an epoch."""

    def __init__(self, stream: Streamed, seed: int) -> None:
        self.stream = stream
        self.reader = ForwardReader(stream.dataset, seed)

    def __getitems__(self, keys: Any) -> list[Any]:
        reader = self.reader
        if keys.epoch != reader.epoch or min(keys.samples) < reader.position:
            reader.restart(keys.epoch)
        wanted_samples = set(keys.samples)
        samples: dict[int, Any] = {}
        for sample in range(reader.position, max(wanted_samples) + 1):
            item = self._next()
            if sample in wanted_samples:
                samples[sample] = reader.decoded(item, sample)
        return [samples[sample] for sample in keys.samples]

    def _next(self) -> Any:
        reader, length = self.reader, len(self.stream)
        try:
            item = reader.next()
        except StopIteration:
            raise WorkloadError(
                f"the stream ended after {reader.position} of {length} samples; return all samples to every reader: "
                "do not divide the stream by rank or by worker (get_worker_info)"
            ) from None
        if reader.position == length and self.stream.is_whole and reader.has_more():
            raise WorkloadError(f"the stream has more samples than the {length} of its length or an earlier count")
        return item
