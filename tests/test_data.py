"""How samples are split over ranks and micro-batches, their order in an epoch, and the data loader."""

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
from everyrank.data.order import drawn_order, epoch_order, shard_order
from everyrank.data.parts import parts_for_updates, weights_of
from everyrank.data.seeds import mix
from everyrank.errors import WorkloadError
from everyrank.world import World


@pytest.mark.parametrize(("total", "count"), list(itertools.product(range(12), range(1, 6))))
def test_cut_covers_everything_once(total: int, count: int) -> None:
    """Slices are contiguous, together they cover every position, and their sizes differ by at most one."""
    parts = [cut(total, Slice(index, count)) for index in range(count)]
    assert [position for part in parts for position in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("total", "accumulate"), list(itertools.product(range(1, 9), range(1, 6))))
def test_no_micro_batch_is_empty(total: int, accumulate: int) -> None:
    """If an update has fewer samples than micro-batches, it has one micro-batch for each sample."""
    parts = micro_batches(total, accumulate)
    assert [position for part in parts for position in part] == list(range(total))
    assert all(parts)
    assert len(parts) == min(total, accumulate)


class Files(zoo.Points):
    """Points in two files."""

    shard_sizes = (10, 11)


@pytest.mark.parametrize(("count", "accumulate", "batch"), list(itertools.product((1, 2, 3, 5), (1, 4, 7), (2, 5, 16))))
def test_each_micro_batch_of_shards_has_a_sample_on_some_rank(count: int, accumulate: int, batch: int) -> None:
    """Otherwise batch norm has nothing to normalise in the last update of an epoch."""
    workload = dataclasses.replace(zoo.workload("frozen"), order="shard", global_batch=batch)
    updates = list(all_updates(2 * updates_per_epoch(21, batch), updates_per_epoch(21, batch)))
    parts_by_rank = [
        list(parts_for_updates(workload, Files(21), updates, Slice(rank, count), accumulate, False))
        for rank in range(count)
    ]
    for parts_of_update in zip(*parts_by_rank, strict=True):
        assert all(any(part.size for part in micro_batch) for micro_batch in zip(*parts_of_update, strict=True))
    read = [sample for parts in itertools.chain(*parts_by_rank) for p in parts for sample in p.keys.samples[: p.size]]
    assert sorted(read) == sorted([*range(21)] * 2)


def test_epoch_order_equals_that_of_distributed_sampler() -> None:
    """The permutation is that of torch's `DistributedSampler` with the same seed and epoch."""
    sampler: Any = torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0, seed=3)
    sampler.set_epoch(4)
    assert epoch_order(10, seed=3, epoch=4).tolist() == list(sampler)
    assert epoch_order(10, 3, 4).tolist() != epoch_order(10, 3, 5).tolist()


@pytest.mark.parametrize(
    "order",
    [
        epoch_order,
        lambda length, seed, epoch: shard_order([length], seed, epoch),
        lambda length, seed, epoch: drawn_order(torch.ones(length), seed, epoch),
    ],
)
def test_largest_seed_has_an_order_in_every_epoch(order: Any) -> None:
    """A seed above 64 bits counts from 0 again. Negative seeds stay torch's."""
    assert order(50, 2**64 - 1, 1).tolist() == order(50, 0, 0).tolist()
    assert order(50, 2**64 - 3, 2).tolist() == order(50, 2**64 - 1, 0).tolist()
    assert order(50, -(2**63), 1).tolist() == order(50, -(2**63) + 1, 0).tolist()


def test_updates_and_samples_per_epoch() -> None:
    """With 23 samples in batches of 7, an epoch has four updates. The last has two samples."""
    assert updates_per_epoch(23, 7) == 4
    assert list(all_updates(6, 4))[3:] == [Update(3, 0, 3), Update(4, 1, 0), Update(5, 1, 1)]
    assert [Epoch(((23, 7),)).samples_before(step) for step in range(7)] == [0, 7, 14, 21, 23, 30, 37]


def read_micro_batches(world: World, workers: int, accumulate: int) -> list[list[tuple[int, int, int, list[float]]]]:
    """Return (size, start, total, first column) of each micro-batch of eight updates."""
    world = dataclasses.replace(world, loader_workers=workers)
    workload = zoo.workload("frozen")
    updates = list(all_updates(8, 4))
    local_slice = Slice(world.rank, world.size)
    batches = batches_for_updates(workload, zoo.Points(23), updates, local_slice, accumulate, world, torch.float64)
    return [[(part.size, part.start, part.total, part.input[:, 0].tolist()) for part in parts] for parts in batches]


@pytest.mark.parametrize(
    ("count", "workers", "accumulate"), [(1, 1, 1), (2, 3, 2), (3, 1, 1), (4, 0, 1), (4, 0, 3), (4, 3, 3)]
)
def test_ranks_read_each_sample_once(ranks: Any, count: int, workers: int, accumulate: int) -> None:
    """Over all ranks and micro-batches, each sample of an epoch is read once, in the order of one process."""
    parts_by_rank = ranks(count, read_micro_batches, workers, accumulate)
    points = zoo.Points(23)
    for update in all_updates(8, 4):
        order = epoch_order(23, 0, update.epoch).tolist()[update.index * 7 : update.index * 7 + 7]
        parts = [part for updates_of_rank in parts_by_rank for part in updates_of_rank[update.step]]
        parts.sort(key=lambda part: part[1])
        values = [value for size, _, _, inputs in parts for value in inputs[:size]]
        assert values == [float(points[index][0][0].double()) for index in order]
        assert all(total == len(order) for _, _, total, _ in parts)
        assert all(len(inputs) == max(1, size) for size, _, _, inputs in parts), "an empty part has one dummy sample"


def test_all_ranks_get_the_same_number_of_validation_batches(ranks: Any) -> None:
    """With nine samples in batches of seven, two of four ranks have no sample of the second batch."""
    sizes_by_rank = ranks(4, validation_batch_sizes)
    assert {len(sizes) for sizes in sizes_by_rank} == {2}
    assert [sum(sizes) for sizes in zip(*sizes_by_rank, strict=True)] == [7, 2]


def validation_batch_sizes(world: World) -> list[int]:
    """Return the number of samples that this rank has of each batch."""
    local_slice = Slice(world.rank, world.size)
    parts = batches_for_evaluation(zoo.workload("frozen"), zoo.Points(9), local_slice, world, torch.float64)
    return [part.size for part in parts]


class RandomValues(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is a random number with its index as the target."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(1), torch.tensor(index)


def random_values_of_two_epochs(world: World, reverse: bool) -> dict[tuple[int, int], float]:
    """Return the random value of each (epoch, sample)."""
    workload = zoo.workload("frozen", global_batch=5)
    updates = list(all_updates(2, 1))
    batches = batches_for_updates(workload, RandomValues(), updates, Slice(0, 1), 1, world, torch.float64, reverse)
    return {
        (update.epoch, int(index)): float(value)
        for update, (part,) in zip(updates, batches, strict=True)
        for value, index in zip(part.input, part.target, strict=True)
    }


def test_augmentation_depends_only_on_epoch_and_sample(ranks: Any) -> None:
    """The order in which samples are read does not matter. A different epoch draws different values."""
    (forward,), (backward,) = ranks(1, random_values_of_two_epochs, False), ranks(1, random_values_of_two_epochs, True)
    assert forward == backward
    assert len(set(forward.values())) == 10


def test_mix_gives_distinct_seeds() -> None:
    """Neighbouring (seed, epoch, sample) give distinct seeds, and the order of the arguments matters."""
    seeds = {mix(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_map_tensors_keeps_structures() -> None:
    """Dicts, tuples, lists and named tuples keep their types. Other values are unchanged."""
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")
    value = {"a": torch.ones(1), "b": (torch.ones(1), "text"), "c": [1], "d": Pair(torch.ones(1), None)}
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert changed["a"].item() == 2
    assert changed["b"][0].item() == 2
    assert changed["b"][1] == "text"
    assert changed["c"] == [1]
    assert isinstance(changed["d"], Pair)
    assert changed["d"].left.item() == 2


def test_map_tensors_keeps_subclasses_of_dict() -> None:
    """Libraries return dicts with attributes, and `UserDict`, whose tensors must move to the device, too."""
    from collections import OrderedDict, UserDict, defaultdict

    class Output(OrderedDict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            super().__setattr__(key, value)

    class Encoding(UserDict[str, Any]):
        pass

    original = torch.ones(1)
    for kind in (Output, Encoding, OrderedDict, lambda **items: defaultdict(list, items)):
        value: Any = kind(ids=original, more=kind(ids=original))
        changed = map_tensors(value, lambda tensor: tensor + 1)
        assert type(changed) is type(value)
        assert changed["ids"].item() == changed["more"]["ids"].item() == 2
        assert value["ids"] is value["more"]["ids"] is original
    assert map_tensors(Output(ids=original), lambda tensor: tensor + 1).ids.item() == 2
    assert map_tensors(defaultdict(list), lambda tensor: tensor)["new"] == []


@pytest.mark.parametrize("is_sorted", [True, False])
def test_map_tensors_moves_a_packed_sequence(is_sorted: bool) -> None:
    """Its batch sizes stay on the CPU."""
    rows = [torch.ones(3, 2), torch.ones(1, 2)][:: 1 if is_sorted else -1]
    packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=is_sorted)
    moved = map_tensors(packed, lambda tensor: tensor.to("meta"))
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.tolist() == [2, 1, 1]
    assert is_sorted or moved.sorted_indices.device.type == moved.unsorted_indices.device.type == "meta"


class Noisy(TensorDataset):
    """A TensorDataset whose `__getitem__` adds random noise."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        value, target = super().__getitem__(index)
        return value + torch.rand(()), target


class InBatches(TensorDataset):
    """A deterministic TensorDataset that reads many rows at once with `__getitems__`."""

    deterministic = True

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [(self.tensors[0][index] * 2, self.tensors[1][index]) for index in indices]


def batches_of_one_epoch(dataset: Any, workers: int, collate: Any = None) -> list[Any]:
    """Return input and target of each micro-batch of an epoch."""
    workload = dataclasses.replace(zoo.workload("frozen"), global_batch=4, collate=collate)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", 1, workers, 60.0, None, None)  # type: ignore[arg-type]
    updates = all_updates(3, 3)
    batches = batches_for_updates(workload, dataset, updates, Slice(0, 1), 2, world, torch.float32)
    return [(batch.input, batch.target) for parts in batches for batch in parts]


@pytest.mark.parametrize("kind", [TensorDataset, Noisy, InBatches])
def test_rows_read_in_batches_equal_rows_read_one_by_one(kind: type[TensorDataset]) -> None:
    """With and without loader workers the batches are equal, for a plain TensorDataset and for subclasses."""
    dataset = kind(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    in_process, in_worker = batches_of_one_epoch(dataset, 0), batches_of_one_epoch(dataset, 1)
    order = epoch_order(10, 0, 0).tolist()
    for (value, target), (worker_value, worker_target) in zip(in_process, in_worker, strict=True):
        assert torch.equal(value, worker_value)
        assert torch.equal(target, worker_target)
    assert torch.cat([target for _, target in in_process]).tolist() == order
    for value, target in in_process:
        rows = torch.stack([dataset.tensors[0][index] for index in target.tolist()])
        if kind is TensorDataset:
            assert torch.equal(value, rows)
        elif kind is InBatches:
            assert torch.equal(value, rows * 2)
        else:
            noise = value - rows
            assert noise.min() > 0
            assert len({float(row[0]) for row in noise}) == len(noise)  # each sample has different noise


def test_custom_collate_gets_a_list_of_samples() -> None:
    """It gets a list of samples from a TensorDataset, too."""
    dataset = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))

    def collate(samples: list[Any]) -> Any:
        return torch.stack([value for value, _ in samples]) + 1, [int(target) for _, target in samples]

    batches = batches_of_one_epoch(dataset, 0, collate)
    assert [index for _, targets in batches for index in targets] == epoch_order(10, 0, 0).tolist()
    assert torch.equal(batches[0][0], dataset.tensors[0][batches[0][1]] + 1)


@pytest.mark.parametrize("collate", [None, lambda samples: torch.stack([row for (row,) in samples])])
def test_batch_that_is_no_pair_names_its_data(collate: Any) -> None:
    """A wrong evaluation sample is not reported as one of train_data."""
    dataset = TensorDataset(torch.ones(12, 3))
    workload = dataclasses.replace(zoo.workload("frozen"), global_batch=4, collate=collate)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", 1, 0, 60.0, None, None)  # type: ignore[arg-type]
    start = "collate: the batch that it returns for {}" if collate else "{}: a sample"
    with pytest.raises(WorkloadError, match=start.format("train_data") + " must be"):
        batches_of_one_epoch(dataset, 0, collate)
    with pytest.raises(WorkloadError, match=start.format("eval_data") + " must be"):
        list(batches_for_evaluation(workload, dataset, Slice(0, 1), world, torch.float32))
    with pytest.raises(WorkloadError, match=start.format("train_data") + " must be"):
        list(batches_for_evaluation(workload, dataset, Slice(0, 1), world, torch.float32, "train_data"))


@dataclasses.dataclass
class Weights:
    """A callable that cannot be hashed."""

    first: float
    calls: int = 0

    def __call__(self) -> list[float]:
        self.calls += 1
        return [self.first, 1.0]


def test_weights_of_an_object_that_cannot_be_hashed() -> None:
    """They are cached by identity, not by value."""
    weights, equal = Weights(3.0), Weights(3.0)
    assert [weights_of(weights, 2).tolist() for _ in range(3)] == [[3.0, 1.0]] * 3
    assert weights.calls == 1
    weights_of(equal, 2)
    assert equal.calls == 1


def test_updates_are_created_lazily() -> None:
    """A training of 10^15 updates is not stored as a list, and neither is a slice of it."""
    updates = all_updates(10**15, 7)
    assert len(updates) == 10**15
    assert updates[10**14] == Update(10**14, 10**14 // 7, 10**14 % 7)
    last_updates = updates[10**14 :]
    assert (len(last_updates), last_updates[0], last_updates[-1]) == (9 * 10**14, updates[10**14], updates[10**15 - 1])
    assert list(itertools.islice(last_updates, 3)) == list(updates[10**14 : 10**14 + 3])
    assert list(updates[2:2]) == []
    with pytest.raises(IndexError):
        updates[10**15]


def test_epoch_order_is_stored_as_int32() -> None:
    """The permutation equals the int64 permutation of `torch.randperm`."""
    order = epoch_order(100_003, 5, 2)
    assert order.element_size() == 4
    int64_order = torch.randperm(100_003, generator=torch.Generator().manual_seed(7))
    assert torch.equal(order.to(torch.int64), int64_order)
