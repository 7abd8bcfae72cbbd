"""The order of the samples: a function of seed, epoch and step alone, whatever the ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from everyrank.workload import Workload

__all__ = [
    "Epoch",
    "KnownUpdates",
    "Update",
    "all_updates",
    "drawn_order",
    "epoch_order",
    "lone_sample",
    "sample_numbers",
    "samples_per_epoch",
    "shard_order",
    "update_samples",
    "updates_per_epoch",
]


@dataclass(frozen=True)
class Update:
    """One update: batch `index` of `epoch`; `step` counts updates from the start of the training."""

    step: int
    epoch: int
    index: int


@dataclass(frozen=True)
class Epoch:
    """How an epoch is cut into updates.

    parts   (samples, samples of an update) of what is read side by side: one part, or one for each uneven stream
    """

    parts: tuple[tuple[int, int], ...]

    @property
    def samples(self) -> int:
        """Of the whole epoch."""
        return sum(length for length, _ in self.parts)

    @property
    def updates(self) -> int:
        """Until the longest part has ended."""
        return max(updates_per_epoch(length, batch) for length, batch in self.parts)

    def samples_before(self, step: int) -> int:
        """How many samples the updates before `step` have read; the last batches of an epoch may be smaller."""
        epochs, index = divmod(step, self.updates)
        return epochs * self.samples + sum(min(index * batch, length) for length, batch in self.parts)


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """The samples of one epoch in order, (length,). The permutation is the one torch's DistributedSampler draws.

    It takes 4 bytes a sample in every rank (from 2^31 samples on 8), and a while to make: a second for ten millions.
    """
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, dtype=torch.int32 if length < 1 << 31 else torch.int64)


def drawn_order(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """The samples of one epoch drawn with replacement, (length,): what torch's WeightedRandomSampler draws."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


def shard_order(sizes: Sequence[int], seed: int, epoch: int) -> Tensor:
    """All samples, file after file: the files in an order of this epoch, the samples of each in theirs; (length,)."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    files = torch.randperm(len(sizes), generator=generator).tolist()
    return torch.cat([torch.randperm(sizes[file], generator=generator) + starts[file] for file in files])


def samples_per_epoch(workload: Workload, length: int) -> int:
    """How many of `length` samples an epoch of training reads: what to give the functions below.

    All, but with `drop_last` those of a last batch that is smaller than the others.
    """
    return length - length % workload.global_batch if workload.drop_last else length


def updates_per_epoch(length: int, global_batch: int) -> int:
    """The last batch of an epoch may be smaller; none is dropped."""
    return -(-length // global_batch)


def all_updates(steps: int, per_epoch: int, begin: int = 0) -> KnownUpdates:
    """The updates of a training, from its start or from number `begin` on; each is made when it is asked for."""
    return KnownUpdates(range(begin, steps), per_epoch)


class KnownUpdates(Sequence[Update]):
    """Updates by their numbers: a list of a thousand million would take a hundred gigabytes."""

    def __init__(self, steps: range, per_epoch: int) -> None:
        self.steps, self.per_epoch = steps, per_epoch

    @property
    def begin(self) -> int:
        """The number of the first of them."""
        return self.steps.start

    @property
    def epoch(self) -> int:
        """In which the first of them stands."""
        return self.steps.start // self.per_epoch

    @property
    def end(self) -> int:
        """How many updates the training has."""
        return self.steps.stop

    @property
    def is_over(self) -> bool:
        """Whether there are none."""
        return not self.steps

    def ends_epoch(self, done: int) -> bool:
        """Whether an epoch has ended when so many updates of the training are done."""
        return done % self.per_epoch == 0

    def is_last(self, done: int) -> bool:
        """Whether the training has ended then."""
        return done == self.end

    def place(self, done: int) -> dict[str, int]:
        """What is to be known beside `done` to go on from there: nothing."""
        del done
        return {}

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> Update: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Update]: ...
    def __getitem__(self, index: int | slice) -> Update | Sequence[Update]:
        if isinstance(index, slice):
            return KnownUpdates(self.steps[index], self.per_epoch)
        step = self.steps[index]
        return Update(step, step // self.per_epoch, step % self.per_epoch)

    def __iter__(self) -> Iterator[Update]:
        return (Update(step, step // self.per_epoch, step % self.per_epoch) for step in self.steps)


def update_samples(order: Tensor | range, global_batch: int, index: int) -> list[int]:
    """The samples of batch `index` in an epoch of this order."""
    return sample_numbers(order[index * global_batch : (index + 1) * global_batch])


def sample_numbers(part: Tensor | range) -> list[int]:
    """A part of an order as plain numbers; the whole of it would take five times the memory of a tensor."""
    return part.tolist() if isinstance(part, Tensor) else list(part)


def lone_sample(workload: Workload, length: int, updates: Sequence[Update], micro_batches: int) -> str:
    """Which of these updates has a micro-batch of one sample, and what helps; "" where none has."""
    batch = workload.global_batch
    last = updates_per_epoch(length, batch) - 1
    # those of a training follow each other: its first one, and the first that may be ragged
    chosen: Sequence[Update] = updates
    if isinstance(updates, KnownUpdates) and updates:
        ragged = last - updates[0].index
        chosen = [updates[0], *([updates[ragged]] if 0 < ragged < len(updates) else [])]
    for update in chosen:
        size = min(batch, length - update.index * batch)
        if max(1, size // micro_batches) == 1:
            cut = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
            fix = "set Workload.drop_last=True, or take another global_batch"
            if size == batch:
                fix = "take fewer micro-batches, or a larger global_batch"
            return f"update {update.step} has {size} of {length} samples{cut}, so that one is left alone; {fix}"
    return ""
