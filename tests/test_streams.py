"""Streams over ranks and loader workers, files read by parts: each sample once, and the check sees when it is not."""

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
    """Points in an order of each epoch, with noise; broken in the ways that people break it."""

    def __init__(self, length: int, fault: str = "", rank: int = 0, size: int = 1) -> None:
        self.length, self.fault, self.rank, self.size, self.epoch = length, fault, rank, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 0 if self.fault == "epoch forgotten" else epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info()
        for place, number in enumerate(order):
            if self.fault == "by worker" and info is not None and place % info.num_workers != info.id:
                continue
            if self.fault == "by rank" and place % self.size != self.rank:
                number = order[(place + 1) % self.length]  # as many, but not the same
            clean = torch.randn(4, generator=torch.Generator().manual_seed(number))
            yield clean + 0.1 * torch.rand(4), clean[:1]


class Undecoded(IterableDataset[Any]):
    """Numbers, which `decode` makes samples of; each decoding is noted."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.decoded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def decode(self, number: int) -> Any:
        self.decoded.append(number)
        return torch.full((4,), float(number)) + torch.rand(4), torch.zeros(1)


class Files(Dataset[Any]):
    """Numbers in files of these lengths."""

    deterministic = True

    def __init__(self, sizes: list[int]) -> None:
        self.shard_sizes = sizes

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.tensor(index)


class Padded(Dataset[Any]):
    """What a DistributedSampler gives one rank: a dataset that has been divided already, and padded."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        sampler = DistributedSampler(range(length), size, rank, shuffle=False)  # type: ignore[arg-type]
        self.numbers = list(sampler)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.numbers[index])] * 4), torch.zeros(1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), len(target)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def workload_of(data: Any, **changes: Any) -> Workload:
    return dataclasses.replace(
        Workload("stream", build, lambda: data, squares, momentum, global_batch=8, epochs=2), **changes
    )


def losses(world: World, workers: int, layout_text: str) -> list[float]:
    """Of two epochs of a stream with noise; shares of the ranks added up, and the exact evaluation at the end."""
    layout = parse_layout(layout_text)
    here = dataclasses.replace(single_process_world(world) if layout.axis is None else world, loader_workers=workers)
    workload = workload_of(Stream(53), eval_data=lambda: Stream(17))
    train_data, eval_data = open_data(workload, here)
    prepared = prepare(workload, layout, here)
    updates = all_updates(14, updates_per_epoch(len(train_data), 8))
    shares = torch.stack(list(run_updates(prepared, train_data, updates)))
    if layout.axis is not None:
        torch.distributed.all_reduce(shares, group=world.group)
    total, count = evaluate(prepared, eval_data)["loss"]
    assert count == 17
    return [*(shares[:, 0] / shares[:, 1]).tolist(), total / count]


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (1, 3), (2, 0), (2, 1), (3, 0), (3, 3)])
def test_a_stream_is_the_same_training_on_any_ranks_and_workers(ranks: Any, count: int, workers: int) -> None:
    """Order, noise and ragged last batches belong to the stream and its epoch, not to who reads it."""
    [reference] = ranks(1, losses, 0, "single:precision=float64")
    assert len(set(reference)) == 15
    layout = "ddp:precision=float64" if count > 1 else "single:precision=float64"
    for found in ranks(count, losses, workers, layout):
        assert found == pytest.approx(reference, rel=1e-12)


def decoded_here(world: World) -> tuple[list[int], list[float]]:
    data = Undecoded(20)
    workload = workload_of(data)
    updates = all_updates(3, 3)
    batches = batches_for_updates(
        workload, Streamed(data, 20, True), updates, Slice(world.rank, world.size), 1, world, torch.float64
    )
    return data.decoded, [value for parts in batches for part in parts for value in part.input[: part.size, 0].tolist()]


def test_a_reader_decodes_its_own_samples_alone(ranks: Any) -> None:
    """Going through a stream is cheap, decoding is not; and what decoding draws belongs to the sample."""
    found = ranks(2, decoded_here)
    assert sorted(number for decoded, _ in found for number in decoded) == list(range(20))
    [(_, whole)] = ranks(1, decoded_here)
    assert sorted(value for _, values in found for value in values) == sorted(whole)


def read_by_shard(world: World, sizes: list[int], workers: int, accumulate: int) -> list[list[list[int]]]:
    """For each of two epochs the numbers that this rank read, update by update."""
    data = Files(sizes)
    workload = workload_of(data, order="shard", global_batch=4)
    here = dataclasses.replace(world, loader_workers=workers)
    per_epoch = updates_per_epoch(len(data), 4)
    updates = list(all_updates(2 * per_epoch, per_epoch))
    batches = batches_for_updates(
        workload, data, updates, Slice(world.rank, world.size), accumulate, here, torch.float64
    )
    found: list[list[list[int]]] = [[], []]
    for update, parts in zip(updates, batches, strict=True):
        found[update.epoch].append([n for part in parts for n in part.target[: part.size].tolist()])
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


@pytest.mark.parametrize(
    ("sizes", "count", "workers"),
    [([7], 4, 3), ([1, 0, 5, 1], 4, 0), ([2, 9, 1], 3, 1), ([3, 3, 3, 3, 3, 3, 3], 2, 2), ([1, 1, 1], 3, 0)],
)
def test_files_are_read_once_whatever_the_readers(ranks: Any, sizes: list[int], count: int, workers: int) -> None:
    """Fewer files than readers, unequal ones, empty ones; every rank makes as many updates, and the batch is kept."""
    total = sum(sizes)
    found = ranks(count, read_by_shard, sizes, workers, 2)
    for epoch in (0, 1):
        by_update = [flat(rank[epoch][update] for rank in found) for update in range(len(found[0][epoch]))]
        assert sorted(flat(by_update)) == list(range(total))
        assert [len(numbers) for numbers in by_update] == [4] * (total // 4) + [total % 4] * (total % 4 > 0)
        by_rank = [len(flat(rank[epoch])) for rank in found]
        assert max(by_rank) - min(by_rank) <= 1
    if total > 3:
        assert [rank[0] for rank in found] != [rank[1] for rank in found]  # another order in another epoch


def test_a_rank_keeps_to_its_part_of_the_files(ranks: Any) -> None:
    """What order=shard is for: a rank opens few files."""
    sizes = [10] * 6
    for epochs in ranks(2, read_by_shard, sizes, 0, 1):
        files = {number // 10 for update in epochs[0] for number in update}
        assert len(files) == 3


def samples_checked(world: World, fault: str, workers: int = 0) -> list[str]:
    """What the check of the samples says of data that is broken in this way."""
    here = dataclasses.replace(world, loader_workers=workers)
    mesh = open_mesh(parse_layout("ddp"), here)
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
    ("fault", "words"),
    [
        ("", None),
        ("files", None),
        ("padded", "on rank 1 as on rank 0"),
        ("epoch forgotten", "has the order of epoch 0"),
        ("by rank", "were never read"),
        ("files cut twice", "were never read"),
    ],
)
def test_the_audit_sees_what_people_do(ranks: Any, fault: str, words: str | None) -> None:
    """A padded DistributedSampler, a forgotten set_epoch, a stream that is divided twice."""
    for problems in ranks(3, samples_checked, fault):
        assert bool(problems) == (words is not None), problems
        assert words is None or words in " ".join(problems)


def divided_by_worker(world: World, is_hidden: bool) -> list[str]:
    with contextlib.nullcontext() if is_hidden else mock.patch("everyrank.data.stream._hide_worker_info"):
        try:
            return samples_checked(world, "by worker", workers=2)
        except WorkloadError as error:
            return [str(error)]


def test_a_stream_that_divides_itself_by_worker_is_read_whole(ranks: Any) -> None:
    """Many do, those of other libraries too. Where that cannot be kept from them, it ends with a reason."""
    assert ranks(2, divided_by_worker, True) == [[], []]
    for [text] in ranks(2, divided_by_worker, False):
        assert "the stream ended after" in text
        assert "get_worker_info" in text


class Sized(Stream):
    def __init__(self, length: int, said: int) -> None:
        super().__init__(length)
        self.said = said

    def __len__(self) -> int:
        return self.said


class Endless:
    def __init__(self, endless: bool) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(4), torch.zeros(1)


def opened(world: World, kind: str) -> str:
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
    here = dataclasses.replace(world, timeout_seconds=0.05)
    workload = workload_of(data, **changes)
    try:
        found, _ = open_data(workload, here)
        if kind == "endless, with steps":
            return f"{len(found)}"
        list(batches_for_updates(workload, found, all_updates(4, 4), Slice(0, 1), 1, here, torch.float64))
    except WorkloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
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
def test_lengths_that_are_not_so(ranks: Any, kind: str, words: str) -> None:
    """Every rank says what is wrong; none waits for another."""
    for text in ranks(2, opened, kind):
        assert words in text


def test_fingerprints_tell_samples_apart() -> None:
    """Any value, shape, type or name changes them; the same content does not."""
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
