"""Iterable datasets: every reader goes through the whole stream and keeps what is its own.

Sample i of an epoch belongs to update i // global_batch, whatever the ranks and the loader workers; no reader has to
know how many others there are. What that costs is reading, not decoding: a stream with a method `decode(item)` has it
called for a reader's own items alone.
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
    """Whether a dataset can only be gone through."""
    if isinstance(dataset, IterableDataset):  # torch gives it a __getitem__ that only raises
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


class Streamed:
    """An iterable dataset, and how many samples an epoch of it has.

    is_whole   whether the stream ends there (an endless one is cut where the training ends)
    """

    def __init__(self, dataset: Any, length: int, is_whole: bool) -> None:
        self.dataset, self.length, self.is_whole = dataset, length, is_whole

    @property
    def checksum(self) -> str | None:
        """The stream's own, where it has one."""
        return getattr(self.dataset, "checksum", None)

    def __len__(self) -> int:
        return self.length


def count_samples(dataset: Any, limit: int | None, patience_seconds: float) -> tuple[int, bool]:
    """(samples of an epoch, whether the stream ends there): by its `__len__`, else by going through it once.

    Counting stops at `limit`; a stream that says it is `endless` is not counted. Raises `WorkloadError` for one that
    does not end, or that can be gone through but once.
    """
    if hasattr(dataset, "__len__"):
        return len(dataset), True
    if isinstance(dataset, Iterator):
        raise WorkloadError(
            "a generator can be gone through once; give an object whose __iter__ begins anew, or one with __len__"
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
    """The items of an epoch; the dataset hears which one it is."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return iter(dataset)


def _hide_worker() -> None:
    """Let a stream not see that a loader worker reads it: many divide themselves then, and each reader needs all.

    torch has no public way; without it such a stream ends too early, which is said and ends the training.
    """
    if getattr(worker, "_worker_info", None) is not None:
        worker._worker_info = None  # pyright: ignore[reportPrivateUsage]


class ForwardReader:
    """A stream gone through forward, one epoch after the other.

    Randomness inside `decode`, or inside the stream where it has no `decode`, is a function of (seed, epoch, number of
    the sample), which is `first` + `stride` times its position: several streams can have numbers of their own.
    """

    def __init__(self, dataset: Any, seed: int, first: int = 0, stride: int = 1) -> None:
        self.dataset, self.seed, self.first, self.stride = dataset, seed, first, stride
        self.decode: Any = getattr(dataset, "decode", None)
        self.is_random = not getattr(dataset, "deterministic", False)
        # in every epoch: a check of the samples tells them apart
        self.draws_alike = getattr(dataset, "draws_alike", False)
        self.epoch = -1
        self.position = 0  # of the item that comes next
        self.items: Iterator[Any] = iter(())

    def begin(self, epoch: int) -> None:
        """Go back to the first item, of this epoch."""
        self.epoch, self.position = epoch, 0
        self._seed(-1)
        _hide_worker()
        self.items = _items(self.dataset, epoch)

    def next(self) -> Any:
        """The next item. Raises `StopIteration` where there is none."""
        # a stream without `decode` draws while it is gone through: each reader has to draw the same
        if self.is_random and self.decode is None:
            self._seed(self.position)
        item = next(self.items)
        self.position += 1
        return item

    def goes_on(self) -> bool:
        """Whether there is an item more; it is lost."""
        missing = object()
        return next(self.items, missing) is not missing

    def decoded(self, item: Any, position: int) -> Any:
        """The sample that this item holds."""
        if self.decode is None:
            return item
        if self.is_random:
            self._seed(position)
        return self.decode(item)

    def _seed(self, position: int) -> None:
        seed_sample(self.seed, 0 if self.draws_alike else self.epoch, self.first + self.stride * position)


class StreamReader(Dataset[Any]):
    """A stream read by `Keys`, whose samples only ever go up within an epoch."""

    def __init__(self, stream: Streamed, seed: int) -> None:
        self.stream = stream
        self.reader = ForwardReader(stream.dataset, seed)

    def __getitems__(self, keys: Any) -> list[Any]:
        reader = self.reader
        if keys.epoch != reader.epoch or min(keys.samples) < reader.position:
            reader.begin(keys.epoch)
        wanted = set(keys.samples)
        found: dict[int, Any] = {}
        for sample in range(reader.position, max(wanted) + 1):
            item = self._next()
            if sample in wanted:
                found[sample] = reader.decoded(item, sample)
        return [found[sample] for sample in keys.samples]

    def _next(self) -> Any:
        reader, length = self.reader, len(self.stream)
        try:
            item = reader.next()
        except StopIteration:
            raise WorkloadError(
                f"the stream ended after {reader.position} samples of {length}; each reader needs all of it: "
                "it must not divide itself by rank or by worker (get_worker_info)"
            ) from None
        if reader.position == length and self.stream.is_whole and reader.goes_on():
            raise WorkloadError(f"the stream has more samples than the {length} it said, or had, before")
        return item
