"""Streams and file shards over ranks and loader workers: each sample is read once, and mistakes are detected."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from everyrank import Workload, parse_layout
from everyrank.data import Slice, all_updates, batches_for_updates, updates_per_epoch
from everyrank.data.stream import Streamed
from everyrank.errors import WorkloadError
from everyrank.loop import evaluate, open_data, run_updates
from everyrank.parallel.mesh import open_mesh
from everyrank.parity.samples import check_samples, sample_fingerprint
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world


class Stream(IterableDataset[Any]):
    """Noisy points in an order that depends on the epoch. `fault` adds a common mistake of iterable datasets."""

    def __init__(self, length: int, fault: str = "", rank: int = 0, size: int = 1) -> None:
        self.length, self.fault, self.rank, self.size, self.epoch = length, fault, rank, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 0 if self.fault == "epoch forgotten" else epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info()
        for position, number in enumerate(order):
            if self.fault == "by worker" and info is not None and position % info.num_workers != info.id:
                continue
            if self.fault == "by rank" and position % self.size != self.rank:
                number = order[(position + 1) % self.length]  # the same number of samples, but different ones
            clean = torch.randn(4, generator=torch.Generator().manual_seed(number))
            yield clean + 0.1 * torch.rand(4), clean[:1]


class Undecoded(IterableDataset[Any]):
    """A stream of numbers. `decode` turns a number into a sample and records it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.decoded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def decode(self, number: int) -> Any:
        self.decoded.append(number)
        return torch.full((4,), float(number)) + torch.rand(4), torch.zeros(1)


class Files(Dataset[Any]):
    """A dataset of numbers in files of these lengths."""

    deterministic = True

    def __init__(self, sizes: list[int]) -> None:
        self.shard_sizes = sizes

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.tensor(index)


class Padded(Dataset[Any]):
    """The samples that a DistributedSampler gives to one rank. The dataset is already split and padded."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        sampler = DistributedSampler(range(length), size, rank, shuffle=False)  # type: ignore[arg-type]
        self.numbers = list(sampler)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.numbers[index])] * 4), torch.zeros(1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), len(target)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def workload_of(data: Any, **changes: Any) -> Workload:
    return dataclasses.replace(
        Workload("stream", build, lambda: data, squared_error, momentum, global_batch=8, epochs=2), **changes
    )


def losses(world: World, workers: int, layout_text: str) -> list[float]:
    """Train for two epochs on a noisy stream. Return the global loss of each update and the final evaluation loss."""
    layout = parse_layout(layout_text)
    train_world = dataclasses.replace(
        single_process_world(world) if layout.axis is None else world, loader_workers=workers
    )
    workload = workload_of(Stream(53), eval_data=lambda: Stream(17))
    train_data, eval_data = open_data(workload, train_world)
    prepared = prepare(workload, layout, train_world)
    updates = all_updates(14, updates_per_epoch(len(train_data), 8))
    loss_sums = torch.stack(list(run_updates(prepared, train_data, updates)))
    if layout.axis is not None:
        torch.distributed.all_reduce(loss_sums, group=world.group)
    total, count = evaluate(prepared, eval_data)["loss"]
    assert count == 17
    return [*(loss_sums[:, 0] / loss_sums[:, 1]).tolist(), total / count]


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (1, 3), (2, 0), (2, 1), (3, 0), (3, 3)])
def test_stream_losses_do_not_depend_on_ranks_and_workers(ranks: Any, count: int, workers: int) -> None:
    """Order, noise and incomplete last batches depend on the stream and the epoch, not on the reader."""
    [reference] = ranks(1, losses, 0, "single:precision=float64")
    assert len(set(reference)) == 15
    layout = "ddp:precision=float64" if count > 1 else "single:precision=float64"
    for rank_losses in ranks(count, losses, workers, layout):
        assert rank_losses == pytest.approx(reference, rel=1e-12)


def decoded_on_this_rank(world: World) -> tuple[list[int], list[float]]:
    """Return the numbers that this rank decoded, and the first value of each sample that it read."""
    data = Undecoded(20)
    workload = workload_of(data)
    updates = all_updates(3, 3)
    batches = batches_for_updates(
        workload, Streamed(data, 20, True), updates, Slice(world.rank, world.size), 1, world, torch.float64
    )
    return data.decoded, [value for parts in batches for part in parts for value in part.input[: part.size, 0].tolist()]


def test_reader_decodes_only_its_own_samples(ranks: Any) -> None:
    """A rank skips other samples without decoding them. Random numbers drawn in `decode` depend only on the sample."""
    by_rank = ranks(2, decoded_on_this_rank)
    assert sorted(number for decoded, _ in by_rank for number in decoded) == list(range(20))
    [(_, values_on_1_rank)] = ranks(1, decoded_on_this_rank)
    assert sorted(value for _, values in by_rank for value in values) == sorted(values_on_1_rank)


def read_by_shard(world: World, sizes: list[int], workers: int, accumulate: int) -> list[list[list[int]]]:
    """Return the numbers that this rank read in each update of two epochs."""
    data = Files(sizes)
    workload = workload_of(data, order="shard", global_batch=4)
    world_with_workers = dataclasses.replace(world, loader_workers=workers)
    per_epoch = updates_per_epoch(len(data), 4)
    updates = list(all_updates(2 * per_epoch, per_epoch))
    batches = batches_for_updates(
        workload, data, updates, Slice(world.rank, world.size), accumulate, world_with_workers, torch.float64
    )
    numbers_by_epoch: list[list[list[int]]] = [[], []]
    for update, parts in zip(updates, batches, strict=True):
        numbers_by_epoch[update.epoch].append([n for part in parts for n in part.target[: part.size].tolist()])
    return numbers_by_epoch


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


@pytest.mark.parametrize(
    ("sizes", "count", "workers"),
    [([7], 4, 3), ([1, 0, 5, 1], 4, 0), ([2, 9, 1], 3, 1), ([3, 3, 3, 3, 3, 3, 3], 2, 2), ([1, 1, 1], 3, 0)],
)
def test_files_are_read_once_for_any_number_of_readers(ranks: Any, sizes: list[int], count: int, workers: int) -> None:
    """There may be fewer files than readers, unequal files and empty files. The global batch size stays the same."""
    total = sum(sizes)
    numbers_by_rank = ranks(count, read_by_shard, sizes, workers, 2)
    for epoch in (0, 1):
        by_update = [
            flat(rank[epoch][update] for rank in numbers_by_rank) for update in range(len(numbers_by_rank[0][epoch]))
        ]
        assert sorted(flat(by_update)) == list(range(total))
        assert [len(numbers) for numbers in by_update] == [4] * (total // 4) + [total % 4] * (total % 4 > 0)
        by_rank = [len(flat(rank[epoch])) for rank in numbers_by_rank]
        assert max(by_rank) - min(by_rank) <= 1
    if total > 3:
        # the order differs between epochs
        assert [rank[0] for rank in numbers_by_rank] != [rank[1] for rank in numbers_by_rank]


def test_rank_reads_only_its_files(ranks: Any) -> None:
    """With order='shard', a rank opens only its part of the files."""
    sizes = [10] * 6
    for epochs in ranks(2, read_by_shard, sizes, 0, 1):
        files = {number // 10 for update in epochs[0] for number in update}
        assert len(files) == 3


def check_faulty_samples(world: World, fault: str, workers: int = 0) -> list[str]:
    """Return the problems that `check_samples` reports for data with this fault."""
    world_with_workers = dataclasses.replace(world, loader_workers=workers)
    mesh = open_mesh(parse_layout("ddp"), world_with_workers)
    if fault == "padded":
        data: Any = Padded(23, world.rank, world.size)
    elif fault == "files":
        data = Files([5, 1, 17])
    elif fault == "files cut twice":
        data = Files([5, 1, 17])
        mesh = dataclasses.replace(mesh, coordinate={**mesh.coordinate, "replicate": 0})
    else:
        data = Streamed(Stream(23, fault, world.rank, world.size), 23, True)
    workload = workload_of(data, order="shard" if fault.startswith("files") else "global")
    return check_samples(workload, data, None, parse_layout("ddp:accumulate=2"), mesh)[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", None),
        ("files", None),
        ("padded", "on rank 1 as on rank 0"),
        ("epoch forgotten", "has the order of epoch 0"),
        ("by rank", "were never read"),
        ("files cut twice", "were never read"),
    ],
)
def test_sample_check_detects_common_mistakes(ranks: Any, fault: str, message: str | None) -> None:
    """The mistakes are a padded DistributedSampler, a missing set_epoch, and data that is split twice."""
    for problems in ranks(3, check_faulty_samples, fault):
        assert bool(problems) == (message is not None), problems
        assert message is None or message in " ".join(problems)


def check_stream_split_by_worker(world: World, is_hidden: bool) -> list[str]:
    """Return the problems of a stream that splits itself by worker. It sees the worker unless `is_hidden`."""
    with contextlib.nullcontext() if is_hidden else mock.patch("everyrank.data.stream._hide_worker_info"):
        try:
            return check_faulty_samples(world, "by worker", workers=2)
        except WorkloadError as error:
            return [str(error)]


def test_stream_that_splits_itself_by_worker_is_read_completely(ranks: Any) -> None:
    """Many libraries split by worker, so everyrank hides the worker info. Otherwise, an error names the cause."""
    assert ranks(2, check_stream_split_by_worker, True) == [[], []]
    for [text] in ranks(2, check_stream_split_by_worker, False):
        assert "the stream ended after" in text
        assert "get_worker_info" in text


class Sized(Stream):
    """A stream whose `len` may differ from its number of samples."""

    def __init__(self, length: int, reported_length: int) -> None:
        super().__init__(length)
        self.reported_length = reported_length

    def __len__(self) -> int:
        return self.reported_length


class Endless:
    """A stream that never ends. It declares this only if `endless` is True."""

    def __init__(self, endless: bool) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(4), torch.zeros(1)


def error_or_length(world: World, kind: str) -> str:
    """Return the error for data of this kind. For "endless, with steps", return its length."""
    data: Any = {
        "too long": Sized(20, 10),
        "too short": Sized(20, 30),
        "by rank": Files([10 + world.rank]),
        "empty": Stream(0),
        "endless": Endless(False),
        "endless, with steps": Endless(True),
        "endless, counted": Endless(False),
        "generator": ((torch.zeros(4), torch.zeros(1)) for _ in range(10)),
        "loader": DataLoader(Files([10])),
    }[kind]
    changes: dict[str, Any] = {"epochs": None, "steps": 10**9 if kind == "endless, counted" else 5}
    changes = changes if kind.startswith("endless, ") else {}
    short_timeout = dataclasses.replace(world, timeout_seconds=0.05)
    workload = workload_of(data, **changes)
    try:
        train_data, _ = open_data(workload, short_timeout)
        if kind == "endless, with steps":
            return f"{len(train_data)}"
        list(batches_for_updates(workload, train_data, all_updates(4, 4), Slice(0, 1), 1, short_timeout, torch.float64))
    except WorkloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("too long", "more samples than the 10"),
        ("too short", "ended after 20 of 30 samples"),
        ("by rank", "11 samples on rank 1 and 10 on rank 0"),
        ("empty", "the dataset is empty"),
        ("endless", "give Workload.steps"),
        ("endless, with steps", "40"),
        ("endless, counted", "or endless = True"),
        ("generator", "a generator can be used only once"),
        ("loader", "a DataLoader; give its dataset"),
    ],
)
def test_wrong_lengths_are_reported_on_every_rank(ranks: Any, kind: str, message: str) -> None:
    """Every rank raises the error, and no rank waits for another."""
    for text in ranks(2, error_or_length, kind):
        assert message in text


def test_different_samples_have_different_fingerprints() -> None:
    """A different value, shape, type or name changes the fingerprint. Equal content has the same fingerprint."""
    sample = ({"a": torch.arange(3), "b": (1, 2.0)}, torch.zeros(2))
    same = ({"a": torch.arange(3), "b": (1, 2.0)}, torch.zeros(2))
    others = [
        ({"a": torch.arange(3), "b": (1, 2.5)}, torch.zeros(2)),
        ({"a": torch.arange(3), "c": (1, 2.0)}, torch.zeros(2)),
        ({"a": torch.arange(3).float(), "b": (1, 2.0)}, torch.zeros(2)),
        ({"a": torch.arange(3), "b": (1, 2.0)}, torch.zeros(2, 1)),
    ]
    assert sample_fingerprint(sample) == sample_fingerprint(same)
    assert len({sample_fingerprint(sample), *map(sample_fingerprint, others)}) == 5
