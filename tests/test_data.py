"""Which rank reads what: the arithmetic, the order, the loader."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import zoo
from everyrank.data import (
    Epoch,
    Slice,
    Update,
    all_updates,
    batches_for_evaluation,
    batches_for_updates,
    cut,
    micro_batches,
    updates_per_epoch,
)
from everyrank.data.loader import map_tensors
from everyrank.data.order import epoch_order
from everyrank.data.seeds import mix
from everyrank.world import World


@pytest.mark.parametrize(("total", "count"), list(itertools.product(range(12), range(1, 6))))
def test_cut_covers_everything_once(total: int, count: int) -> None:
    """Parts are contiguous, together they are everything, and their sizes differ by at most one."""
    parts = [cut(total, Slice(index, count)) for index in range(count)]
    assert [position for part in parts for position in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("total", "accumulate"), list(itertools.product(range(1, 9), range(1, 6))))
def test_no_micro_batch_is_empty(total: int, accumulate: int) -> None:
    """A micro-batch without a sample on any rank is left out, on all ranks alike."""
    parts = micro_batches(total, accumulate)
    assert [position for part in parts for position in part] == list(range(total))
    assert all(parts)
    assert len(parts) == min(total, accumulate)


def test_order_is_that_of_distributed_sampler() -> None:
    """A person who compares with torch's own sampler finds the same permutation."""
    sampler: Any = torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0, seed=3)
    sampler.set_epoch(4)
    assert epoch_order(10, seed=3, epoch=4).tolist() == list(sampler)
    assert epoch_order(10, 3, 4).tolist() != epoch_order(10, 3, 5).tolist()


def test_updates_and_samples() -> None:
    """23 samples in batches of 7: four updates an epoch, the last of two samples."""
    assert updates_per_epoch(23, 7) == 4
    assert list(all_updates(6, 4))[3:] == [Update(3, 0, 3), Update(4, 1, 0), Update(5, 1, 1)]
    assert [Epoch(((23, 7),)).samples_before(step) for step in range(7)] == [0, 7, 14, 21, 23, 30, 37]


def read(world: World, workers: int, accumulate: int) -> list[list[tuple[int, int, int, list[float]]]]:
    import dataclasses

    world = dataclasses.replace(world, loader_workers=workers)
    workload = zoo.workload("frozen")
    updates = list(all_updates(8, 4))
    reads = Slice(world.rank, world.size)
    batches = batches_for_updates(workload, zoo.Points(23), updates, reads, accumulate, world, torch.float64)
    return [[(part.size, part.start, part.total, part.input[:, 0].tolist()) for part in parts] for parts in batches]


@pytest.mark.parametrize(
    ("count", "workers", "accumulate"), [(1, 1, 1), (2, 3, 2), (3, 1, 1), (4, 0, 1), (4, 0, 3), (4, 3, 3)]
)
def test_ranks_read_each_sample_once(ranks: Any, count: int, workers: int, accumulate: int) -> None:
    """Over all ranks and micro-batches each sample of an epoch is read once, in the order of one process."""
    found = ranks(count, read, workers, accumulate)
    points = zoo.Points(23)
    for update in all_updates(8, 4):
        order = epoch_order(23, 0, update.epoch).tolist()[update.index * 7 : update.index * 7 + 7]
        parts = [part for rank in found for part in rank[update.step]]
        parts.sort(key=lambda part: part[1])
        values = [value for size, _, _, inputs in parts for value in inputs[:size]]
        assert values == [float(points[index][0][0].double()) for index in order]
        assert all(total == len(order) for _, _, total, _ in parts)
        assert all(len(inputs) == max(1, size) for size, _, _, inputs in parts), "an empty part borrows one sample"


def test_evaluation_is_called_equally_often(ranks: Any) -> None:
    """Four ranks, nine samples in batches of seven: two ranks have no sample of the second batch."""
    found = ranks(4, evaluate)
    assert {len(sizes) for sizes in found} == {2}
    assert [sum(sizes) for sizes in zip(*found, strict=True)] == [7, 2]


def evaluate(world: World) -> list[int]:
    reads = Slice(world.rank, world.size)
    parts = batches_for_evaluation(zoo.workload("frozen"), zoo.Points(9), reads, world, torch.float64)
    return [part.size for part in parts]


class Coins(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nothing but randomness."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(1), torch.tensor(index)


def coins(world: World, reverse: bool) -> dict[tuple[int, int], float]:
    workload = zoo.workload("frozen", global_batch=5)
    updates = list(all_updates(2, 1))
    batches = batches_for_updates(workload, Coins(), updates, Slice(0, 1), 1, world, torch.float64, reverse)
    return {
        (update.epoch, int(index)): float(value)
        for update, (part,) in zip(updates, batches, strict=True)
        for value, index in zip(part.input, part.target, strict=True)
    }


def test_randomness_belongs_to_the_sample(ranks: Any) -> None:
    """The same sample of the same epoch is augmented the same way wherever it stands; another epoch differently."""
    (forward,), (backward,) = ranks(1, coins, False), ranks(1, coins, True)
    assert forward == backward
    assert len(set(forward.values())) == 10


def test_mix_is_a_good_seed() -> None:
    """Neighbouring (seed, epoch, sample) give unrelated seeds, and order matters."""
    seeds = {mix(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_map_tensors_keeps_structures() -> None:
    """Dicts, tuples, lists and named tuples come back as what they were; other values untouched."""
    from collections import namedtuple

    pair = namedtuple("pair", "left right")
    value = {"a": torch.ones(1), "b": (torch.ones(1), "text"), "c": [1], "d": pair(torch.ones(1), None)}
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert changed["a"].item() == 2
    assert changed["b"][0].item() == 2
    assert changed["b"][1] == "text"
    assert changed["c"] == [1]
    assert isinstance(changed["d"], pair)
    assert changed["d"].left.item() == 2


class Noisy(TensorDataset):
    """Rows, to which reading adds something: no plain TensorDataset."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        value, target = super().__getitem__(index)
        return value + torch.rand(()), target


class InBatches(TensorDataset):
    """Rows that its own code reads, many at once, and says that it draws nothing at random."""

    deterministic = True

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [(self.tensors[0][index] * 2, self.tensors[1][index]) for index in indices]


def fetched(dataset: Any, workers: int, collate: Any = None) -> list[Any]:
    """Input and target of each batch of an epoch."""
    workload = dataclasses.replace(zoo.workload("frozen"), global_batch=4, collate=collate)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", 1, workers, 60.0, None, None)  # type: ignore[arg-type]
    updates = all_updates(3, 3)
    batches = batches_for_updates(workload, dataset, updates, Slice(0, 1), 2, world, torch.float32)
    return [(batch.input, batch.target) for parts in batches for batch in parts]


@pytest.mark.parametrize("kind", [TensorDataset, Noisy, InBatches])
def test_rows_at_once_are_rows_one_by_one(kind: type[TensorDataset]) -> None:
    """With or without loader workers, plain rows or what a subclass makes of them: the same batches."""
    dataset = kind(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    here, in_worker = fetched(dataset, 0), fetched(dataset, 1)
    order = epoch_order(10, 0, 0).tolist()
    for (value, target), (other, same) in zip(here, in_worker, strict=True):
        assert torch.equal(value, other)
        assert torch.equal(target, same)
    assert torch.cat([target for _, target in here]).tolist() == order
    for value, target in here:
        rows = torch.stack([dataset.tensors[0][index] for index in target.tolist()])
        if kind is TensorDataset:
            assert torch.equal(value, rows)
        elif kind is InBatches:
            assert torch.equal(value, rows * 2)
        else:
            noise = value - rows
            assert noise.min() > 0
            assert len({float(row[0]) for row in noise}) == len(noise)  # each sample has its own


def test_a_collate_of_ones_own_sees_samples() -> None:
    """It gets a list of samples, also of a TensorDataset."""
    dataset = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))

    def collate(samples: list[Any]) -> Any:
        return torch.stack([value for value, _ in samples]) + 1, [int(target) for _, target in samples]

    found = fetched(dataset, 0, collate)
    assert [index for _, targets in found for index in targets] == epoch_order(10, 0, 0).tolist()
    assert torch.equal(found[0][0], dataset.tensors[0][found[0][1]] + 1)


def test_updates_are_made_when_they_are_asked_for() -> None:
    """A training of 10^15 updates has no list of them; a part of it is one as well."""
    updates = all_updates(10**15, 7)
    assert len(updates) == 10**15
    assert updates[10**14] == Update(10**14, 10**14 // 7, 10**14 % 7)
    later = updates[10**14 :]
    assert (len(later), later[0], later[-1]) == (9 * 10**14, updates[10**14], updates[10**15 - 1])
    assert list(itertools.islice(later, 3)) == list(updates[10**14 : 10**14 + 3])
    assert list(updates[2:2]) == []
    with pytest.raises(IndexError):
        updates[10**15]


def test_the_order_of_an_epoch_takes_four_bytes_a_sample() -> None:
    """The permutation is that of the eight bytes that torch takes by itself."""
    order = epoch_order(100_003, 5, 2)
    assert order.element_size() == 4
    wide = torch.randperm(100_003, generator=torch.Generator().manual_seed(7))
    assert torch.equal(order.to(torch.int64), wide)
