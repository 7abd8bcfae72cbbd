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

__all__ = ["StreamReader", "Streamed", "count_samples", "is_stream"]


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


class StreamReader(Dataset[Any]):
    """A stream read by `Keys`, whose samples only ever go up within an epoch.

    Randomness inside `decode`, or inside the stream where it has no `decode`, is a function of (seed, epoch, sample).
    """

    def __init__(self, stream: Streamed, seed: int) -> None:
        self.stream, self.seed = stream, seed
        self.decode: Any = getattr(stream.dataset, "decode", None)
        self.is_random = not getattr(stream.dataset, "deterministic", False)
        self.draws_alike = getattr(
            stream.dataset, "draws_alike", False
        )  # in every epoch: a check of the samples tells them apart
        self.epoch = -1
        self.position = 0  # of the item that comes next
        self.items: Iterator[Any] = iter(())

    def __getitems__(self, keys: Any) -> list[Any]:
        if keys.epoch != self.epoch or min(keys.samples) < self.position:
            self.epoch, self.position = keys.epoch, 0
            self._seed(-1)
            _hide_worker()
            self.items = _items(self.stream.dataset, self.epoch)
        wanted = set(keys.samples)
        found: dict[int, Any] = {}
        for sample in range(self.position, max(wanted) + 1):
            # a stream without `decode` draws while it is gone through: each reader has to draw the same
            if self.is_random and self.decode is None:
                self._seed(sample)
            item = self._next()
            if sample in wanted:
                found[sample] = self._decoded(item, sample)
        return [found[sample] for sample in keys.samples]

    def _next(self) -> Any:
        try:
            item = next(self.items)
        except StopIteration:
            raise WorkloadError(
                f"the stream ended after {self.position} samples of {len(self.stream)}; each reader needs all of it: "
                "it must not divide itself by rank or by worker (get_worker_info)"
            ) from None
        self.position += 1
        if self.position == len(self.stream) and self.stream.is_whole and self._goes_on():
            raise WorkloadError(f"the stream has more samples than the {len(self.stream)} it said, or had, before")
        return item

    def _goes_on(self) -> bool:
        missing = object()
        return next(self.items, missing) is not missing

    def _decoded(self, item: Any, sample: int) -> Any:
        if self.decode is None:
            return item
        if self.is_random:
            self._seed(sample)
        return self.decode(item)

    def _seed(self, sample: int) -> None:
        seed_sample(self.seed, 0 if self.draws_alike else self.epoch, sample)
