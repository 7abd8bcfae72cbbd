"""Updates over uneven streams: all ranks make the same number of updates, and know the number of samples of each rank.

Each rank fetches its samples of the next update and sends their number to the others, in a gather that overlaps with
the previous update. If no rank has samples, the epoch has ended.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from everyrank.data.fetch import Batch, fetch_all, map_tensors, move, pair_of
from everyrank.data.order import Update
from everyrank.data.slicing import Slice, cut
from everyrank.data.uneven import NOTHING, UnevenKeys, UnevenReader, UnevenStreams
from everyrank.errors import WorkloadError
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Agreed", "OpenUpdates", "uneven_batches"]


class Agreed:
    """The number of samples of every reader in an update. The first access waits for the other ranks."""

    def __init__(self, local_counts: Sequence[int], reads: Slice, smallest: int, world: World) -> None:
        self.local_counts, self.reads, self.smallest = local_counts, reads, smallest
        self.rows: list[Tensor] = []
        self.work: Any = None
        self.gathered: list[list[int]] | None = None
        if world.group is not None and world.size > 1:
            message = torch.tensor([reads.index, *local_counts], device=world.device)
            self.rows = [torch.empty_like(message) for _ in range(world.size)]
            self.work = dist.all_gather(self.rows, message, group=world.group, async_op=True)

    @property
    def sizes(self) -> list[list[int]]:
        """The number of samples by micro-batch and reader."""
        if self.gathered is None:
            table = [list(self.local_counts)]
            if self.work is not None:
                self.work.wait()
                # ranks with different parts of the model read the same streams
                by_reader = {index: sizes for index, *sizes in (row.tolist() for row in self.rows)}
                table = [by_reader[index] for index in range(self.reads.count)]
            self.gathered = [list(column) for column in zip(*table, strict=True)]
        return self.gathered

    @property
    def total(self) -> int:
        """The number of samples of the update over all readers."""
        return sum(map(sum, self.sizes))

    @property
    def is_over(self) -> bool:
        """Whether the epoch has ended before this update; always False in a simulation."""
        return self.total < self.smallest and not self.is_simulated

    @property
    def is_simulated(self) -> bool:
        """Whether one process reads for several ranks in turn, without knowing the others' counts."""
        return self.work is None and self.reads.count > 1


def agree(local_counts: Sequence[int], reads: Slice, workload: Workload, world: World) -> Agreed:
    """Send this rank's number of samples in each micro-batch to all ranks. An asynchronous collective."""
    return Agreed(local_counts, reads, workload.global_batch if workload.drop_last else 1, world)


class OpenUpdates(Iterable[Update]):
    """The updates of a training of unknown length (`data.Updates`). An epoch ends when all of its streams have ended.

    Iterating yields each update when it is taken.

    step, epoch, index   of the next update
    epochs, steps        length of the training; one of the two is set
    ahead                the counts of all ranks for the next update
    num_read             number of samples read before each update so far, and in total
    """

    def __init__(
        self, epochs: int | None, steps: int | None, drop_last: bool, step: int = 0, epoch: int = 0, index: int = 0
    ) -> None:
        self.epochs, self.steps, self.drop_last = epochs, steps, drop_last
        self.start_step, self.step, self.epoch, self.index = step, step, epoch, index
        self.next_request = (epoch, index)
        self.num_read = [0]
        self.ahead: Agreed | None = None
        self.newest = Update(step, epoch, index)

    def ask(self) -> Iterator[Update]:
        """Yield updates for the loader without an end, because it prefetches before the end of an epoch is known."""
        while True:
            epoch, index = self.next_request
            self.next_request = (epoch, index + 1)
            yield Update(-1, epoch, index)

    def is_next(self, update: Update) -> bool:
        """Whether this is the next update, and not one that was prefetched beyond the end of an epoch."""
        return (update.epoch, update.index) == (self.epoch, self.index)

    def take(self, total: int) -> None:
        """Advance to the next update; this one has `total` samples."""
        self.newest = Update(self.step, self.epoch, self.index)
        self.num_read.append(self.num_read[-1] + total)
        self.step, self.index = self.step + 1, self.index + 1

    def end_epoch(self) -> None:
        """Advance to the next epoch. Raises `WorkloadError` for an epoch without an update."""
        if self.index == 0:
            reason = "no full batch in all streams (drop_last=True)" if self.drop_last else "the streams are empty"
            raise WorkloadError(f"epoch {self.epoch} has no update: {reason}")
        self.epoch, self.index = self.epoch + 1, 0
        self.next_request = (self.epoch, 0)

    @property
    def end(self) -> int | None:
        """The number of updates of the whole training; None if it is given in epochs."""
        return self.steps

    @property
    def is_over(self) -> bool:
        """Whether all updates have been taken."""
        return self.step == self.steps or self.epoch == self.epochs

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether an epoch ends with the last update."""
        assert steps_done == self.step
        return self.ahead is not None and self.ahead.is_over

    def is_last(self, steps_done: int) -> bool:
        """Whether the training ends with the last update."""
        return steps_done == self.steps or (self.ends_epoch(steps_done) and self.newest.epoch + 1 == self.epochs)

    def samples_before(self, step: int) -> int:
        """Return the number of samples read between `start_step` and update `step`."""
        return self.num_read[min(step, self.step) - self.start_step]

    def position(self, steps_done: int) -> dict[str, int]:
        """Return the position to resume from: the epoch, and the number of its finished updates."""
        epoch, index = self.newest.epoch, self.newest.index
        return {"epoch": epoch + 1, "index": 0} if self.ends_epoch(steps_done) else {"epoch": epoch, "index": index + 1}

    def __iter__(self) -> Iterator[Update]:
        num_yielded = self.start_step
        while num_yielded < self.step:
            num_yielded += 1
            yield self.newest


def uneven_batches(
    workload: Workload,
    data: UnevenStreams,
    updates: Iterable[Update],
    reads: Slice,
    accumulate: int,
    world: World,
    dtype: torch.dtype,
    reverse: bool,
) -> Iterator[list[Batch]]:
    """Yield, for each update, this rank's part of each micro-batch with samples. All ranks end at the same update."""
    data.check_readers(reads, workload.global_batch)
    open_updates = updates if isinstance(updates, OpenUpdates) else None
    pending: collections.deque[Update] = collections.deque()

    def keys() -> Iterator[UnevenKeys]:
        for update in updates if open_updates is None else open_updates.ask():
            pending.append(update)
            yield from (UnevenKeys(update.epoch, update.index, number) for number in range(accumulate))

    collate = functools.partial(_collate, workload.collate or default_collate)
    fetched = fetch_all(UnevenReader(data, workload, reads, accumulate, reverse), collate, keys(), world)

    def take() -> tuple[int, list[Any], Agreed] | None:
        """Return this rank's part of the next update, and start to send its size to all ranks."""
        while contents := list(itertools.islice(fetched, accumulate)):
            update = pending.popleft()
            if open_updates is None or open_updates.is_next(update):
                return update.epoch, contents, agree([size for size, _, _ in contents], reads, workload, world)
        return None

    ahead = take()
    while ahead is not None:
        epoch, contents, agreed = ahead
        _check_padding(agreed, len(data.streams), epoch)
        if agreed.is_over:
            if open_updates is None:
                raise WorkloadError("the streams of train_data have fewer samples than when they were counted")
            open_updates.end_epoch()
            ahead = None if open_updates.is_over else take()
            continue
        if open_updates is not None:
            open_updates.take(agreed.total)
        ahead = take()
        if open_updates is not None and ahead is not None:
            open_updates.ahead = ahead[2]
        change = functools.partial(move, device=world.device, dtype=dtype)
        yield _parts(contents, agreed, reads, change, workload.collate is not None)
        if open_updates is not None and open_updates.is_over:
            return


def _collate(collate: Callable[[Any], Any], read: tuple[int, list[Any], list[int]]) -> tuple[int, Any, list[int]]:
    size, samples, sample_indices = read
    return size, collate(samples) if samples else None, sample_indices


def _check_padding(agreed: Agreed, streams: int, epoch: int) -> None:
    """Raise `WorkloadError` on every rank if one has no sample to use as a dummy."""
    for reader, size in enumerate(agreed.sizes[0]):
        if size == NOTHING:
            reader = agreed.reads.index if agreed.is_simulated else reader
            local_streams = list(cut(streams, Slice(reader, agreed.reads.count)))
            raise WorkloadError(
                f"train_data: streams {local_streams} gave no sample in epoch {epoch}, but the rank that reads them "
                "needs one to take part in the collectives; leave out empty streams"
            )


def _parts(
    contents: Sequence[tuple[int, Any, list[int]]],
    agreed: Agreed,
    reads: Slice,
    change: Callable[[torch.Tensor], torch.Tensor],
    has_collate: bool,
) -> list[Batch]:
    """Return this rank's part of each micro-batch that has samples on any rank."""
    start, batches, num_parts = 0, list[Batch](), sum(any(sizes) or agreed.is_simulated for sizes in agreed.sizes)
    for (size, content, sample_indices), sizes in zip(contents, agreed.sizes, strict=True):
        if any(sizes) or agreed.is_simulated:
            value, target = pair_of(content, has_collate=has_collate)
            first = start + sum(sizes[: reads.index])
            changed = map_tensors(value, change), map_tensors(target, change)
            batches.append(Batch(*changed, size, first, agreed.total, num_parts, sample_indices))
        start += sum(sizes)
    return batches
