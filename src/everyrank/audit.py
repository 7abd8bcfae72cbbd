"""Audit the samples: each one read once in every epoch, and counted once in the evaluation.

The real loader reads the real dataset under the layout; only what a sample holds is replaced by its number.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from everyrank.collectives import gather
from everyrank.data import Slice, all_updates, batches_for_evaluation, batches_for_updates, updates_per_epoch
from everyrank.layout import Layout
from everyrank.loop import blame_workload
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["audit", "complaints"]

_NUM_EPOCHS = 2


def audit(
    workload: Workload, train_data: Any, eval_data: Any, layout: Layout, world: World, reads: Slice
) -> tuple[list[str], str]:
    """What is wrong (nothing: []), and what was audited. The same on every rank that takes part; a collective."""
    counted = dataclasses.replace(workload, collate=_numbers)
    per_epoch = updates_per_epoch(len(train_data), workload.global_batch)
    problems: list[str] = []
    orders: list[list[int]] = []
    updates = list(all_updates(_NUM_EPOCHS * per_epoch, per_epoch))
    batches = batches_for_updates(
        counted, _Numbered(train_data), updates, reads, layout.accumulate, world, torch.float64
    )
    own: list[list[int]] = [[] for _ in range(_NUM_EPOCHS)]
    with blame_workload():
        for update, parts in zip(updates, batches, strict=True):
            for part in parts:
                own[update.epoch] += part.input[: part.size].tolist()
    for epoch, numbers in enumerate(own):
        order = _over_ranks(numbers, world, reads)
        orders.append(order)
        problems += complaints(order, len(train_data), f"epoch {epoch}")
    if len(train_data) > 8 and orders[0] == orders[1]:  # few samples can come out the same twice
        problems.append(
            "epoch 1 has the order of epoch 0: the epoch does not reach the order of the samples (set_epoch)"
        )
    text = f"{_NUM_EPOCHS} epochs of {len(train_data)} samples, each read once"
    if eval_data is not None:
        with blame_workload():
            parts = batches_for_evaluation(counted, _Numbered(eval_data), reads, world, torch.float64)
            numbers = [number for part in parts for number in part.input[: part.size].tolist()]
        problems += complaints(_over_ranks(numbers, world, reads), len(eval_data), "evaluation")
        text += f"; {len(eval_data)} evaluated, each counted once"
    return problems, text


def complaints(numbers: Sequence[int], length: int, what: str) -> list[str]:
    """What is wrong with having read `numbers` where each of `range(length)` was to be read once."""
    times = Counter(numbers)
    missing = [number for number in range(length) if number not in times]
    repeated = [number for number, count in times.items() if count > 1]
    foreign = [number for number in times if not 0 <= number < length]
    found: list[str] = []
    if missing:
        found.append(f"{what}: {len(missing)} of {length} samples were never read, the first is {missing[0]}")
    if repeated:
        found.append(
            f"{what}: {len(repeated)} of {length} samples were read more than once, the first is {repeated[0]}"
        )
    if foreign:
        found.append(f"{what}: sample {foreign[0]} is not one of the {length} there are")
    return found


class _Numbered(Dataset[int]):
    """A dataset that is really read, but hands out the numbers of its samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        self.dataset[index]
        return index

    def __len__(self) -> int:
        return len(self.dataset)


def _numbers(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor(list(samples))
    return numbers, numbers


def _over_ranks(numbers: list[int], world: World, reads: Slice) -> list[int]:
    own = torch.tensor(numbers, dtype=torch.int64)
    rows = gather(own, world) if reads.count > 1 else [own]
    return [number for row in rows for number in row.tolist()]
