"""The sample order: a function of seed, epoch and step only, independent of ranks and workers."""

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
    "batch_of_one",
    "drawn_order",
    "epoch_order",
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
    """The sizes of an epoch and its updates.

    parts   (samples of the epoch, samples of an update): one pair, or one for each uneven stream
    """

    parts: tuple[tuple[int, int], ...]

    @property
    def samples(self) -> int:
        """The number of samples in the epoch."""
        return sum(length for length, _ in self.parts)

    @property
    def updates(self) -> int:
        """The number of updates until the longest part ends."""
        return max(updates_per_epoch(length, batch) for length, batch in self.parts)

    def samples_before(self, step: int) -> int:
        """Return the number of samples read before update `step`; the last batches of an epoch may be smaller."""
        epochs, index = divmod(step, self.updates)
        return epochs * self.samples + sum(min(index * batch, length) for length, batch in self.parts)


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """Return the samples of one epoch in order, (length,): the permutation that torch's DistributedSampler draws.

    It takes 4 bytes per sample on every rank (8 from 2^31 samples on), and one second for ten million samples.
    """
    generator = _generator(seed, epoch)
    return torch.randperm(length, generator=generator, dtype=torch.int32 if length < 1 << 31 else torch.int64)


def drawn_order(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Return the samples of one epoch drawn with replacement, (length,), as torch's WeightedRandomSampler."""
    generator = _generator(seed, epoch)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


def shard_order(sizes: Sequence[int], seed: int, epoch: int) -> Tensor:
    """Shuffle the files of an epoch, and the samples within each file: all samples in order, (length,)."""
    generator = _generator(seed, epoch)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    files = torch.randperm(len(sizes), generator=generator).tolist()
    return torch.cat([torch.randperm(sizes[file], generator=generator) + starts[file] for file in files])


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator with seed `seed + epoch`; above 64 bits, which torch refuses, it counts from 0 again."""
    generator = torch.Generator()
    total = seed + epoch
    generator.manual_seed(total if total < 1 << 64 else total - (1 << 64))
    return generator


def samples_per_epoch(workload: Workload, length: int) -> int:
    """Return the number of samples that an epoch reads: all, or with `drop_last` those of full batches only."""
    return length - length % workload.global_batch if workload.drop_last else length


def updates_per_epoch(length: int, global_batch: int) -> int:
    """Return the number of updates in an epoch; the last batch may be smaller."""
    return -(-length // global_batch)


def all_updates(steps: int, per_epoch: int) -> KnownUpdates:
    """Return the first `steps` updates of a training with `per_epoch` updates in each epoch, as a lazy sequence."""
    return KnownUpdates(range(steps), Epoch(((per_epoch, 1),)))


class KnownUpdates(Sequence[Update]):
    """Updates by their numbers (`data.Updates`). A list of 10^9 updates would take a hundred gigabytes."""

    def __init__(self, steps: range, epoch_sizes: Epoch) -> None:
        self.steps, self.epoch_sizes = steps, epoch_sizes
        self.per_epoch = epoch_sizes.updates  # cached, because it is used in each update

    @property
    def start_step(self) -> int:
        """The number of the first update."""
        return self.steps.start

    @property
    def epoch(self) -> int:
        """The epoch of the first update."""
        return self.steps.start // self.per_epoch

    @property
    def end(self) -> int:
        """The number of updates of the training up to the end of this sequence."""
        return self.steps.stop

    @property
    def is_over(self) -> bool:
        """Whether there are no updates."""
        return not self.steps

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether an epoch ends after `steps_done` updates of the training."""
        return steps_done % self.per_epoch == 0

    def is_last(self, steps_done: int) -> bool:
        """Whether the training ends after `steps_done` updates."""
        return steps_done == self.end

    def position(self, steps_done: int) -> dict[str, int]:
        """Return {}: the number of updates is enough to resume."""
        del steps_done
        return {}

    def samples_before(self, step: int) -> int:
        """Return the number of samples read before update `step`."""
        return self.epoch_sizes.samples_before(step)

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> Update: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Update]: ...
    def __getitem__(self, index: int | slice) -> Update | Sequence[Update]:
        if isinstance(index, slice):
            return KnownUpdates(self.steps[index], self.epoch_sizes)
        step = self.steps[index]
        return Update(step, step // self.per_epoch, step % self.per_epoch)

    def __iter__(self) -> Iterator[Update]:
        return (Update(step, step // self.per_epoch, step % self.per_epoch) for step in self.steps)


def update_samples(order: Tensor | range, global_batch: int, index: int) -> list[int]:
    """Return the samples of batch `index` in an epoch of this order."""
    return sample_numbers(order[index * global_batch : (index + 1) * global_batch])


def sample_numbers(positions: Tensor | range) -> list[int]:
    """Convert a slice of an order to a list. Only slices: a list needs nine times the memory of an int32 tensor."""
    return positions.tolist() if isinstance(positions, Tensor) else list(positions)


def batch_of_one(workload: Workload, length: int, updates: Sequence[Update], micro_batches: int) -> str:
    """Return a message about the first update with a micro-batch of one sample and how to avoid it, or ""."""
    batch = workload.global_batch
    last = updates_per_epoch(length, batch) - 1
    # the updates of a training are consecutive: so it is enough to check the first one and the first uneven one
    checked: Sequence[Update] = updates
    if isinstance(updates, KnownUpdates) and updates:
        uneven = last - updates[0].index
        checked = [updates[0], *([updates[uneven]] if 0 < uneven < len(updates) else [])]
    for update in checked:
        size = min(batch, length - update.index * batch)
        if max(1, size // micro_batches) == 1:
            where = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
            fix = "set Workload.drop_last=True, or use a different global_batch"
            if size == batch:
                fix = "use fewer micro-batches, or a larger global_batch"
            return f"update {update.step} has {size} of {length} samples{where}, so a micro-batch has one sample; {fix}"
    return ""
