"""The audit reads samples and indices before the script does, and leaves datasets and samplers as they were."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    _utils,
    dataloader,
)

from everyrank.audit.events import Fetch, LoaderEpoch, Unchecked
from everyrank.audit.watch import loaders
from everyrank.audit.watch.loaders import dataset_checksums, sample_checksums
from everyrank.audit.watch.recorder import Recorder, Settings


class LazyFile(Dataset[int]):
    """Opens its file at the first read, as with h5py. It also has a cache, a counter and generators of its own."""

    def __init__(self, path: str) -> None:
        self.path, self.file = path, None
        self.cache: dict[int, int] = {}
        self.history, self.rows, self.state = list[int](), set[int](), {"reads": 0}
        self.generators = (np.random.default_rng(0), torch.Generator(), random.Random(0), np.random.RandomState(0))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file: Any = Path(self.path).open("rb")  # noqa: SIM115
        self.file.seek(index)
        self.cache[index] = self.file.read(1)[0]
        self.history.append(index)
        self.rows.add(index)
        self.state["reads"] += 1
        numpy_generator, torch_generator, python_generator, old_generator = self.generators
        for draw in (numpy_generator.random, python_generator.random, old_generator.rand):
            draw()
        torch.rand(1, generator=torch_generator)
        return self.cache[index]

    def values(self) -> list[str]:
        """Return the attributes and the states of the generators as text."""
        numpy_generator, torch_generator, python_generator, old_generator = self.generators
        states = numpy_generator.bit_generator.state, torch_generator.get_state().tolist(), python_generator.getstate()
        return [*map(repr, vars(self).values()), *map(repr, states), repr(old_generator.get_state()[1:])]


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, [1, 2]), lambda data: ConcatDataset([data])]
)
def test_dataset_is_as_it_was_before_the_reads(wrap: Any) -> None:
    """So it can be sent to spawned workers, and forked workers do not share the offset of a file."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(bytes(range(8)))
        lazy_file = LazyFile(file.name)
        dataset, before = wrap(lazy_file), lazy_file.values()
        assert "content" in dataset_checksums(dataset)
        assert len(sample_checksums(dataset, [0, 1])) == 2
        assert lazy_file.values() == before
        pickle.dumps(dataset)


class Fields:
    """An object whose `repr` is its address."""

    def __init__(self, value: float) -> None:
        self.value = value


class Image(Fields):
    """An image has its address in its `repr`, too, but its content in `tobytes`."""

    def tobytes(self) -> bytes:
        return np.float64(self.value).tobytes()


def array_with(value: float) -> np.ndarray:
    """Return a large array that is 0 except in its middle, which `repr` does not show."""
    array = np.zeros((50, 50))
    array[25, 25] = value
    return array


SAMPLES = {
    "large array": array_with,
    "image": Image,
    "bfloat16": lambda value: torch.full((3,), value, dtype=torch.bfloat16),
    "sparse tensor": lambda value: torch.eye(3).mul(value).to_sparse(),
    "numbers and text": lambda value: {"label": value, "name": str(value), "path": Path(str(value))},
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_checksums_depend_on_the_content_of_samples(kind: str) -> None:
    make = SAMPLES[kind]
    first, same = ([make(float(number)) for number in range(1, 5)] for _ in range(2))
    assert dataset_checksums(first)["content"] == dataset_checksums(same)["content"]
    assert sample_checksums(first, [0, 1, 2, 3]) == sample_checksums(same, [0, 1, 2, 3])
    assert len(set(sample_checksums(first, [0, 1, 2, 3]))) == 4


@pytest.mark.parametrize("make", [Fields, lambda value: np.array([Fields(value)])])
def test_samples_without_a_known_content_have_no_checksum(make: Any) -> None:
    """A hash of an address would be different for equal samples."""
    samples = [make(1.0), make(2.0)]
    assert dataset_checksums(samples) == {}
    assert sample_checksums(samples, [0, 1]) == []


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_batch_sampler_may_use_one_container_for_all_batches(make: Any) -> None:
    def batches() -> Iterator[Any]:
        batch = make([0, 1])
        for number in range(3):
            batch[0] = 2 * number
            yield batch
            batch[1] = -1

    read = [[int(index) for index in batch] for batch in loaders._read_batches(batches())]
    assert read == [[0, 1], [2, -1], [4, -1]]


class RecordedEvents(list[Any]):
    """Replaces the recorder of the hooks."""

    is_muted = False
    write = list.append


def test_each_epoch_records_two_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers, each epoch has a new fetcher."""
    kind: Any = _utils.fetch._MapDatasetFetcher
    monkeypatch.setattr(kind, "fetch", kind.fetch)
    events: Any = RecordedEvents()
    loaders._watch_random_numbers(kind, events)
    fetchers = (kind([0], True, list, False) for _ in range(20))  # each may have the address of the one before
    for fetcher in fetchers:
        for _ in range(3):
            fetcher.fetch([0])
        del fetcher
    assert [event.number for event in events if isinstance(event, Fetch)] == [1, 2] * 20


@pytest.fixture
def hook_loaders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[Any]]:
    """Hooks the loaders of this process, which then run this number of batches. Returns the list of events."""

    def hook(batches: int) -> list[Any]:
        events: list[Any] = []
        recorder = Recorder(Settings(str(tmp_path), batches=batches))
        monkeypatch.setattr(recorder, "write", events.append)
        for kind, names in (
            (DataLoader, ("__init__", "__len__")),
            (dataloader._BaseDataLoaderIter, ("__init__", "_reset", "__next__")),
        ):
            for name in names:
                monkeypatch.setattr(kind, name, getattr(kind, name))
        watched = loaders.Loaders(recorder, lambda: None)
        loaders._watch_loader(recorder, watched)
        loaders._watch_iterators(recorder, watched)
        return events

    return hook


class Stream(IterableDataset[int]):
    """A stream of known length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize("num_batches", [5, 9, 12, 13, 40, 43])
def test_loader_without_indices_has_the_length_that_it_reports(
    num_batches: int, hook_loaders: Callable[[int], list[Any]]
) -> None:
    """A schedule such as OneCycleLR raises if an epoch has more batches than `len(loader)`."""
    hook_loaders(4)
    for loader in (DataLoader(Stream(2 * num_batches), batch_size=2), DataLoader(range(num_batches), batch_size=None)):
        assert len(list(loader)) == len(loader) <= 12


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, set, lambda pair: range(pair[0], pair[1] + 1)])
def test_indices_of_each_kind_of_batch_are_recorded(
    make: Callable[[Any], Any], hook_loaders: Callable[[int], list[Any]]
) -> None:
    events = hook_loaders(4)
    loader = DataLoader(range(60), batch_sampler=[make([2 * number, 2 * number + 1]) for number in range(30)])
    assert len(list(loader)) == 6
    epoch = next(event for event in events if isinstance(event, LoaderEpoch))
    assert epoch.num_batches == 30
    assert epoch.indices == list(range(60))
    assert epoch.sizes == [2]


def test_epoch_of_a_very_long_sampler_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, hook_loaders: Callable[[int], list[Any]]
) -> None:
    """Only the first indices are read in advance."""
    monkeypatch.setattr(loaders, "_MAX_SAMPLES", 10)
    hook_loaders(0)
    assert len(list(DataLoader(range(60), batch_size=2))) == 30


@pytest.mark.parametrize("sampler", [np.arange(10), torch.arange(10)], ids=["array", "tensor"])
def test_array_as_sampler_is_not_hooked(sampler: Any, hook_loaders: Callable[[int], list[Any]]) -> None:
    """Otherwise `__iter__` of all tensors would be replaced."""
    events, iterate = hook_loaders(4), type(sampler).__iter__
    data = TensorDataset(torch.arange(10))
    assert len(list(DataLoader(data, sampler=sampler, batch_size=2))) == 5
    assert type(sampler).__iter__ is iterate
    assert not [event for event in events if isinstance(event, Unchecked)]
