"""The order of the samples: a function of seed, epoch and step alone, whatever the ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "Update",
    "all_updates",
    "epoch_order",
    "samples_before",
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


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The samples of one epoch in order. The permutation is the one torch's DistributedSampler draws."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def shard_order(sizes: Sequence[int], seed: int, epoch: int) -> list[int]:
    """All samples, file after file: the files in an order of this epoch, and the samples of each in one of theirs."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    order: list[int] = []
    for shard in torch.randperm(len(sizes), generator=generator).tolist():
        inside = torch.randperm(sizes[shard], generator=generator) + starts[shard]
        order += inside.tolist()
    return order


def updates_per_epoch(length: int, global_batch: int) -> int:
    """The last batch of an epoch may be smaller; none is dropped."""
    return -(-length // global_batch)


def all_updates(steps: int, per_epoch: int) -> Iterator[Update]:
    """The updates of a training from its start."""
    return (Update(step, step // per_epoch, step % per_epoch) for step in range(steps))


def update_samples(order: Sequence[int], global_batch: int, index: int) -> Sequence[int]:
    """The samples of batch `index` in an epoch of this order."""
    return order[index * global_batch : (index + 1) * global_batch]


def samples_before(step: int, length: int, global_batch: int) -> int:
    """How many samples the updates before `step` have read; the last batch of an epoch may be smaller."""
    epochs, index = divmod(step, updates_per_epoch(length, global_batch))
    return epochs * length + min(index * global_batch, length)
