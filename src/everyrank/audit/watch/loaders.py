"""Records the indices that each DataLoader reads, on each rank and in each epoch, and random numbers in its workers.

All indices of an epoch are drawn and recorded when it begins. Then a long epoch is shortened to its first batches and
the last one, which may be smaller. Streams end after a few batches. `len(loader)` keeps its remainder modulo 4, because
gradient accumulation may depend on it.
"""

# The hooks replace parts of torch that are private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import random
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any, TypedDict

import numpy as np
import torch
import torch.utils.data.dataloader as torch_loader
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    _utils,
    get_worker_info,
)

from everyrank.audit.events import Fetch, LoaderBatch, LoaderEpoch
from everyrank.audit.watch.modules import rows
from everyrank.audit.watch.recorder import Recorder, all_leaves, harmless, local_bytes
from everyrank.audit.watch.restored_dataset import restored_dataset
from everyrank.audit.watch.source_location import is_user_class, user_line

__all__ = ["Loaders", "install_loaders", "random_states"]

_MAX_SAMPLES, _MAX_INDICES, _EXTRA_BATCHES, _MODULUS = 2_000_000, 200_000, 8, 4
_READ_SECONDS = 0.3  # to read the samples of an epoch again
_SEED, _OTHER_SEED = 1234567, 7654321
_PLAIN_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)


class _DatasetChecksums(TypedDict, total=False):
    """Fields of LoaderEpoch that identify the data of a dataset."""

    subset: int
    seeded: str
    content: str


class _MapDatasetFields(_DatasetChecksums, total=False):
    """Fields of LoaderEpoch for a map-style dataset."""

    num_batches: int
    indices: list[int | str]
    num_indices: int
    sizes: list[int]
    samples: list[int]


@dataclasses.dataclass
class _Sampler:
    """The sampler of a loader that was constructed at this line, and whether it was read."""

    sampler: weakref.ref[Any]
    dataset: weakref.ref[Any]
    kind: str
    line: str
    was_read: bool = False


class Loaders:
    """Records the loaders of this process: the epoch of the last batch, and the training epochs of each loader."""

    def __init__(self, recorder: Recorder, finish: Callable[[], None]) -> None:
        self.recorder, self.finish = recorder, finish
        self.num_loaders: Counter[str] = Counter()  # by line
        self.last_epoch: tuple[int, int] | None = None  # loader, epoch
        self.trained_epochs: dict[int, set[int]] = {}
        self.samplers: list[_Sampler] = []
        self.hooked_classes: set[Any] = set()  # classes of samplers whose __iter__ is hooked

    @harmless("the samplers of loaders")
    def add_sampler(self, loader: Any) -> None:
        """Remember a custom sampler of a loader."""
        sampler, dataset = loader.sampler, loader.dataset
        sampler_class: Any = type(sampler)
        is_custom = (
            sampler_class not in _PLAIN_SAMPLERS
            and (isinstance(sampler, Sampler) or is_user_class(sampler_class))  # not a list, an array or a tensor
            and hasattr(sampler_class, "__iter__")
        )
        if not loader._auto_collation or not is_custom or not type(dataset).__weakrefoffset__:
            return
        line = getattr(loader, "_audit_line", "")
        self.samplers.append(_Sampler(weakref.ref(sampler), weakref.ref(dataset), sampler_class.__name__, line))
        if sampler_class not in self.hooked_classes:
            self.hooked_classes.add(sampler_class)
            iterate: Any = sampler_class.__iter__

            @functools.wraps(iterate)
            def iterating(sampler: Any) -> Any:
                for sampler_record in self.samplers:
                    sampler_record.was_read |= sampler_record.sampler() is sampler
                return iterate(sampler)

            sampler_class.__iter__ = iterating  # pyright: ignore[reportAttributeAccessIssue]

    def lost_sampler(self, loader: Any) -> list[str]:
        """Class and line of an earlier sampler of this dataset that was deleted before it was read; [] if none was."""
        for sampler_record in self.samplers:
            if (
                sampler_record.sampler() is None
                and not sampler_record.was_read
                and sampler_record.dataset() is loader.dataset
            ):
                return [sampler_record.kind, sampler_record.line]
        return []

    def _number(self, loader: Any) -> int:
        """An id made from the loader's line, so that ids agree on all ranks even if one rank has more loaders."""
        if "_audit_number" not in loader.__dict__:
            line = getattr(loader, "_audit_line", "")
            loader.__dict__["_audit_number"] = zlib.crc32(f"{line} {self.num_loaders[line]}".encode())
            self.num_loaders[line] += 1
        return loader.__dict__["_audit_number"]

    def backward(self) -> None:
        """Remember that the last epoch is used for training."""
        if self.last_epoch is not None:
            self.trained_epochs.setdefault(self.last_epoch[0], set()).add(self.last_epoch[1])

    def shortened(self, length: int) -> int:
        """The number of batches to run in an epoch of this length."""
        batches = self.recorder.settings.batches
        if not batches or length <= batches + _EXTRA_BATCHES:
            return length
        return batches + (length - batches) % _MODULUS

    @harmless("an epoch of a loader")
    def begin_epoch(self, iterator: Any, loader: Any) -> None:
        """Record the indices of an epoch, and shorten it. End the run if the loader has had enough training epochs."""
        if self.recorder.is_muted or getattr(iterator, "_audited", None) is iterator._sampler_iter:
            return
        number = self._number(loader)
        epoch = loader.__dict__["_audit_epoch"] = loader.__dict__.get("_audit_epoch", -1) + 1
        iterator._audit = {"loader": number, "epoch": epoch, "yielded": 0, "limit": None, "first_after_skip": None}
        indices: _MapDatasetFields = {}
        if iterator._dataset_kind == torch_loader._DatasetKind.Map and iterator._auto_collation:
            indices = self._indices(iterator, loader, epoch)
        elif self.recorder.settings.batches:
            length = self._length_of_stream(loader)
            # for a stream with a length, the number that the script gets from len(loader)
            iterator._audit["limit"] = self.shortened(length) if length else self.recorder.settings.batches + 4
        iterator._audited = iterator._sampler_iter
        sampler = loader.sampler
        self.recorder.write(
            LoaderEpoch(
                loader=number,
                epoch=epoch,
                line=getattr(loader, "_audit_line", ""),
                used_at=user_line(),
                made_at=[getattr(source, "_audit_line", "") for source in (sampler, loader.dataset)],
                dataset=type(loader.dataset).__name__,
                sampler=type(sampler).__name__,
                batch_sampler=type(getattr(loader, "batch_sampler", None)).__name__,
                sampled_length=_length(getattr(sampler, "dataset", None)),
                sampler_epoch=getattr(sampler, "epoch", None),
                shuffles=getattr(sampler, "shuffle", None),
                workers=loader.num_workers,
                length=_length(loader.dataset),
                lost_sampler=self.lost_sampler(loader),
                **indices,
            )
        )
        if len(self.trained_epochs.get(number, ())) >= self.recorder.settings.epochs > 0:
            self.finish()

    def _indices(self, iterator: Any, loader: Any, epoch: int) -> _MapDatasetFields:
        try:
            with self.recorder.muted():  # an endless sampler draws many random numbers
                batches = _read_batches(iterator._sampler_iter)
        except Exception as error:  # an error of the sampler: raise it where the script expects it
            iterator._sampler_iter = _raise_when_read(error)
            raise
        # The rest of a very long epoch is not read in advance. The code below may raise, so this comes first.
        iterator._sampler_iter = itertools.chain(batches, iterator._sampler_iter)
        are_lists = bool(batches) and all(map(_has_size, batches))
        raw_indices = [index for batch in batches for index in _items(batch)] if are_lists else []
        indices = [_key(index) for index in raw_indices]
        if epoch == 0:
            with self.recorder.muted():
                loader.__dict__["_audit_content"] = dataset_checksums(loader.dataset)
        content: _DatasetChecksums = loader.__dict__["_audit_content"]
        samples: list[int] = []
        if epoch == 0 and "seeded" in content and are_lists and self.recorder.world_size > 1:
            with self.recorder.muted():
                samples = sample_checksums(loader.dataset, raw_indices)
        count = min(self.shortened(self._length(loader, batches)), len(batches))
        if len(batches) > count:
            iterator._audit["first_after_skip"] = count
            iterator._sampler_iter = iter(batches[: count - 1] + batches[-1:])
        return {
            "num_batches": len(batches),
            "indices": dataset_indices(loader.dataset, indices)[:_MAX_INDICES],
            "num_indices": len(indices),
            "sizes": sorted({_size(batch) for batch in batches}) if are_lists else [],
            "samples": samples,
            **content,
        }

    def _length(self, loader: Any, batches: list[Any]) -> int:
        """The number of batches of an epoch whose first batches are `batches`."""
        if sum(map(_size, batches)) < _MAX_SAMPLES:
            return len(batches)
        with self.recorder.muted():
            return _length(loader) or len(batches)

    def _length_of_stream(self, loader: Any) -> int | None:
        """The number of batches of a loader without indices, if it has one."""
        before = loader._IterableDataset_len_called  # torch warns of a wrong length only after a call of len(loader)
        with self.recorder.muted():
            length = _length(loader)
        loader._IterableDataset_len_called = before
        return length

    @harmless("batches of a loader")
    def record_batch(self, iterator: Any, batch: Any, seconds: float) -> None:
        """Record the checksums of a batch, and how long the script waited for it."""
        state, records_functions = iterator._audit, self.recorder.settings.records_functions
        state["yielded"] += 1
        self.last_epoch = state["loader"], state["epoch"]
        with self.recorder.muted():
            samples = rows(batch) if records_functions else []
        self.recorder.write(
            LoaderBatch(
                loader=state["loader"],
                epoch=state["epoch"],
                number=state["yielded"],
                seconds=seconds,
                row_checksums=samples,
                is_after_skip=state["yielded"] == state["first_after_skip"],
            )
        )


def _read_batches(batches: Any) -> list[Any]:
    """All batches of an epoch, up to a limit, because a sampler may draw 10^10 samples with replacement."""
    first_batches: list[Any] = []
    num_samples = 0
    for batch in batches:
        first_batches.append(_copy(batch))
        num_samples += _size(batch)
        if num_samples >= _MAX_SAMPLES:
            break
    return first_batches


def _copy(batch: Any) -> Any:
    """A copy of the indices of a batch, because a batch sampler may yield one list or tensor again and again."""
    if isinstance(batch, list | np.ndarray):
        return batch.copy()
    return batch.clone() if isinstance(batch, torch.Tensor) else batch


def _raise_when_read(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _has_size(batch: Any) -> bool:
    """Whether a batch of indices can be read without using it up, as a list, a tuple, a range, an array or a tensor."""
    return isinstance(batch, Sized) and getattr(batch, "ndim", 1) > 0


def _size(batch: Any) -> int:
    return len(batch) if _has_size(batch) else 1


def _items(batch: Any) -> list[Any]:
    return batch.tolist() if isinstance(batch, np.ndarray | torch.Tensor) else list(batch)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # a stream
        return None


def _key(index: Any) -> Any:
    """An index of a sampler as a number, or any other key as text."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return repr(index)


def dataset_indices(dataset: Any, indices: list[Any]) -> list[Any]:
    """The indices into the dataset that a `Subset` refers to."""
    while isinstance(dataset, Subset) and all(isinstance(index, int) for index in indices[:1]):
        indices, dataset = [int(dataset.indices[index]) for index in indices], dataset.dataset
    return indices


def dataset_checksums(dataset: Any) -> _DatasetChecksums:
    """Checksums that identify the data of a dataset, from the first, the middle and the last sample.

    subset   checksum of the first 5,000 indices of the innermost Subset
    seeded   hash of these samples with a fixed seed, which is equal on ranks with the same data, even if augmented
    content  the same hash if it does not depend on the seed
    """
    checksums: _DatasetChecksums = {}
    while isinstance(dataset, Subset):
        checksums["subset"] = zlib.crc32(repr([int(index) for index in list(dataset.indices)[:5000]]).encode())
        dataset = dataset.dataset
    length = _length(dataset) or 1
    positions = list(dict.fromkeys((0, length // 2, length - 1)))
    # a dataset may refuse to give a sample twice
    with contextlib.suppress(Exception), _restored_random_states(), restored_dataset(dataset):
        contents = [
            "".join(_digest(_seeded_sample(dataset, position, seed)).hexdigest() for position in positions)
            for seed in (_SEED, _SEED, _OTHER_SEED)
        ]
        if contents[0] == contents[1]:  # otherwise the dataset has its own generator, or a counter
            checksums["seeded"] = contents[0]
            if contents[0] == contents[2]:
                checksums["content"] = contents[0]
    return checksums


def sample_checksums(dataset: Any, indices: list[Any]) -> list[int]:
    """A checksum of each of these samples, read with a fixed seed; [] if reading them fails or takes too long."""
    checksums: dict[Any, int] = {}
    end = time.monotonic() + _READ_SECONDS
    with contextlib.suppress(Exception), _restored_random_states(), restored_dataset(dataset):
        for index in indices[:_MAX_INDICES]:
            if index not in checksums:
                digest = _digest(_seeded_sample(dataset, index, _SEED)).digest()
                checksums[index] = int.from_bytes(digest[:6], "big")
            if time.monotonic() > end:
                return []
        return [checksums[index] for index in indices[:_MAX_INDICES]]
    return []


@contextlib.contextmanager
def _restored_random_states() -> Generator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _seeded_sample(dataset: Any, index: Any, seed: int) -> Any:
    for set_seed in (torch.default_generator.manual_seed, random.seed, np.random.seed):
        set_seed(seed)
    return dataset[index]


def _digest(value: Any) -> Any:
    """A hash of all tensors and other values in a sample. Raises `TypeError` for an object whose value is unknown."""
    digest = hashlib.sha256()
    for leaf in all_leaves(value):
        digest.update(_leaf_bytes(leaf))
    return digest


def _leaf_bytes(leaf: Any) -> bytes:
    """Bytes that are equal in all processes for equal values. `repr` abbreviates arrays, and prints addresses."""
    if isinstance(leaf, torch.Tensor):
        return local_bytes(leaf).tobytes()
    if hasattr(leaf, "tobytes") and not getattr(getattr(leaf, "dtype", None), "hasobject", False):  # also an image
        return leaf.tobytes()
    text = repr(sorted(map(repr, leaf))) if isinstance(leaf, set | frozenset) else repr(leaf)
    is_standard = type(leaf).__module__.partition(".")[0] in sys.stdlib_module_names
    if " at 0x" in text or not (is_standard or isinstance(leaf, str | int | float | enum.Enum)):
        raise TypeError(f"{type(leaf).__name__} has no checksum")
    return text.encode()


def install_loaders(recorder: Recorder, loaders: Loaders) -> None:
    """Hook each epoch of each DataLoader."""
    _record_lines()
    _watch_loader(recorder, loaders)
    _watch_iterators(recorder, loaders)
    for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
        _watch_random_numbers(fetcher, recorder)


def _record_lines() -> None:
    """Record the lines that construct DistributedSamplers and Subsets."""
    kinds: tuple[Any, ...] = (DistributedSampler, Subset)
    for kind in kinds:
        init = kind.__init__

        @functools.wraps(init)
        def init_and_record(self: Any, *args: Any, init: Any = init, **kwargs: Any) -> None:
            self.__dict__["_audit_line"] = user_line()
            init(self, *args, **kwargs)

        kind.__init__ = init_and_record


def _watch_loader(recorder: Recorder, loaders: Loaders) -> None:
    loader: Any = torch_loader.DataLoader
    init, length = loader.__init__, loader.__len__

    @functools.wraps(init)
    def init_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_audit_line"] = user_line()
        if recorder.settings.devices and "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        init(self, *args, **kwargs)
        loaders.add_sampler(self)

    @functools.wraps(length)
    def shortened(self: Any) -> int:
        return length(self) if recorder.is_muted else loaders.shortened(length(self))

    loader.__init__, loader.__len__ = init_and_record, shortened


def _watch_iterators(recorder: Recorder, loaders: Loaders) -> None:
    iterator: Any = torch_loader._BaseDataLoaderIter
    init, reset, next_item = iterator.__init__, iterator._reset, iterator.__next__

    @functools.wraps(init)
    def init_and_record(self: Any, loader: Any) -> None:
        init(self, loader)
        loaders.begin_epoch(self, loader)

    @functools.wraps(reset)
    def reset_and_begin(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        if first_iter and hasattr(self, "_audited"):
            # reset has created a new iterator; use the recorded one instead
            self._sampler_iter = self._audited
        else:
            loaders.begin_epoch(self, loader)

    @functools.wraps(next_item)
    def next_batch(self: Any) -> Any:
        state = getattr(self, "_audit", None)
        if state is None or recorder.is_muted:
            return next_item(self)
        if state["limit"] is not None and state["yielded"] >= state["limit"]:
            raise StopIteration
        start = time.perf_counter()
        batch = next_item(self)
        loaders.record_batch(self, batch, time.perf_counter() - start)
        return batch

    iterator.__init__, iterator._reset, iterator.__next__ = init_and_record, reset_and_begin, next_batch


def _watch_random_numbers(fetcher: Any, recorder: Recorder) -> None:
    """Record generator states before and after the first two batches of each worker, in each epoch."""
    fetch = fetcher.fetch

    def fetched(self: Any, index: Any) -> Any:
        number = self._audit_fetched = getattr(self, "_audit_fetched", 0) + 1
        if number > 2 or recorder.is_muted:
            return fetch(self, index)
        before = random_states()
        out = fetch(self, index)
        worker = get_worker_info()
        recorder.write(
            Fetch(
                number=number,
                worker=worker.id if worker else -1,
                dataset=type(self.dataset).__name__,
                before=before,
                after=random_states(),
            )
        )
        return out

    fetcher.fetch = fetched


def random_states() -> list[int]:
    """Checksums of the states of torch's, Python's and numpy's generators."""
    # the global generator of numpy may be of any kind
    numpy_state = np.random.get_state(legacy=False)["state"].values()
    numpy_values = [value.tolist() if isinstance(value, np.ndarray) else value for value in numpy_state]
    states = repr(random.getstate()), repr(numpy_values)
    return [zlib.crc32(torch.get_rng_state().numpy().tobytes()), *(zlib.crc32(state.encode()) for state in states)]
