"""Records the batches of loaders, merges those of several ranks, or shuffles in one order on all ranks."""

# The fetcher of map-style datasets is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import random
import sys
import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data._utils import fetch

from everyrank.audit.watch.source_location import user_line
from everyrank.rerun.inside.session import Session
from everyrank.rerun.recording import EVALUATION_PASSES, SHAPES_DIFFER

__all__ = [
    "NotMergedError",
    "decode_batch",
    "encode_batch",
    "install_batches",
    "is_equal",
    "merge_batches",
    "num_bytes",
    "rows_of_batch",
]

_MAX_BYTES = 3e8
_VALUES_DIFFER = "a batch holds a number or text without a batch dimension, and ranks differ in it"
_MAX_LISTED = 100_000  # batches of a pass; an endless pass has no last batch


class NotMergedError(Exception):
    """The batches of ranks cannot be merged, for this reason."""


def install_batches(session: Session) -> None:
    """Hook DataLoader to number the loaders, and to record or impose each batch."""
    if session.settings["order"]:
        _shuffle_in_one_order(session)
    if session.settings["pass_batches"]:
        _shorten_passes(session.settings["pass_batches"])
    init, iterate, length = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__
    passes: dict[tuple[int, bool], int] = {}
    lengths: dict[int, int] = {}
    recorded_lengths = session.imposed[0]["facts"].get("lengths", {}) if session.imposed else {}

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if session.settings["no_workers"] and session.is_active:
            args, kwargs = _without_workers(args, kwargs)
        init(self, *args, **kwargs)
        number = _number_of_loader(session)
        object.__setattr__(self, "_everyrank_number", number)
        if self.num_workers:
            session.facts.setdefault("with_workers", []).append(number)
        with contextlib.suppress(Exception), session.quiet():
            lengths[number] = length(self)
        session.facts.setdefault("loader_places", {})[number] = user_line()
        session.facts["lengths"] = lengths

    @functools.wraps(length)
    def imposed_length(self: Any) -> int:
        number = getattr(self, "_everyrank_number", -1)
        is_imposed = number in recorded_lengths and session.is_active and not session.settings["by_rows"]
        return recorded_lengths[number] if is_imposed else length(self)

    @functools.wraps(iterate)
    def iterating(self: Any) -> Any:
        number = getattr(self, "_everyrank_number", -1)
        trains = torch.is_grad_enabled()
        # evaluations are counted separately, because perhaps only rank 0 evaluates
        count = passes[number, trains] = passes.get((number, trains), -1 if trains else EVALUATION_PASSES - 1) + 1
        session.passes[id(self.dataset)] = session.passes.get(id(self.dataset), -1) + 1
        if session.settings["by_rows"]:
            key = [number, count]
            recorded = [batch for loader_pass, batch, _ in session.imposed[0]["batches"] if loader_pass == key]
            with session.script_draws():
                iterator = iterate(self)
            return _ByRows(session, iterator, key, recorded) if recorded else _Recorded(session, iterator, key)
        if session.imposed and (merged := _merged_pass(session, number, count)) is not None:
            return merged
        # a custom batch sampler yields each rank's part of a batch; torch's yields the whole batch on every rank
        session.is_split = type(self.batch_sampler) is not BatchSampler
        return _Recorded(session, iterate(self), [number, count])

    DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__ = construct, iterating, imposed_length


def _merged_pass(session: Session, number: int, count: int) -> _Imposed | None:
    """The recorded batches of a pass over a loader; None if no rank has read any."""
    batches = [
        [batch for loader_pass, batch, _ in each["batches"] if loader_pass == [number, count]]
        for each in session.imposed
    ]
    is_trained = any(number in each["facts"].get("training_loaders", []) for each in session.imposed)
    if not is_trained and session.settings["evaluation_rank"] is not None:
        batches = batches[session.settings["evaluation_rank"] :][:1]
    if not (all(batches) if is_trained and torch.is_grad_enabled() else any(batches)):
        session.report_not_imposed(f"not all {len(batches)} ranks read this pass over the loader of {user_line()}")
    return _Imposed(session, batches, number) if any(batches) else None


def _number_of_loader(session: Session) -> int:
    """The number of a new loader, by the line that constructs it: it is the same if only rank 0 has more loaders."""
    location, _, count = session.key("loader")
    return zlib.crc32(f"{location} {count}".encode())


class _Recorded:
    """The iterator of a loader, which records its batches."""

    def __init__(self, session: Session, iterator: Any, key: list[int]) -> None:
        self._session, self._iterator, self._key = session, iterator, key

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        session = self._session
        session.has_started = session.in_loader = True
        try:
            batch = next(self._iterator)
        except StopIteration:
            session.facts.setdefault("read_to_end", []).append(self._key)
            raise
        finally:
            session.in_loader = False
        session.loader = self._key[0]
        session.batch_size = rows_of_batch(batch)
        session.num_batches += 1
        read = session.facts.setdefault("read", [])
        if session.is_active and len(read) < _MAX_LISTED:
            read.append([*self._key, session.num_all_backwards, user_line(), session.num_permutations])
        if session.is_active and not session.settings["order"] and not session.settings["only_rates"]:
            with session.quiet():
                try:
                    size = session.facts.get("bytes", 0) + num_bytes(batch)
                    if size > _MAX_BYTES:
                        raise NotMergedError(f"batches of more than {_MAX_BYTES / 1e6:.0f} MB")
                    session.facts["bytes"] = size
                    session.batches.append((self._key, encode_batch(batch), session.update))
                except NotMergedError as error:
                    if self._key[1] < EVALUATION_PASSES:
                        session.facts.setdefault("update_without_batches", session.update)
                    session.report_not_imposed(str(error))
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class _Imposed:
    """The merged batches of several ranks."""

    def __init__(self, session: Session, rank_batches: list[list[Any]], number: int) -> None:
        self._session, self._parts, self._number, self._next = session, rank_batches, number, 0

    def __iter__(self) -> Any:
        return self

    def __len__(self) -> int:
        return max(len(rank_batches) for rank_batches in self._parts)

    def __next__(self) -> Any:
        session, index = self._session, self._next
        session.has_started = True
        if index >= len(self):
            raise StopIteration
        self._next += 1
        session.loader = self._number
        batches = [rank_batches[index] if index < len(rank_batches) else None for rank_batches in self._parts]
        if None not in batches and all(is_equal(each, batches[0]) for each in batches[1:]):
            batches = batches[:1]  # every rank evaluates all samples, or has a shard of the model
        session.rows = [0 if batch is None else rows_of_batch(batch) for batch in batches]
        session.batch_size = sum(session.rows)
        session.num_batches += 1
        present = [batch for batch in batches if batch is not None]
        with session.quiet():
            try:
                return decode_batch(merge_batches(present))
            except NotMergedError as error:
                session.report_not_imposed(str(error))
                return decode_batch(present[0])


class _ByRows(_Recorded):
    """The recorded samples of a pass, in batches of the loader's own sizes."""

    def __init__(self, session: Session, iterator: Any, key: list[int], recorded: list[Any]) -> None:
        super().__init__(session, _sliced(session, iterator, recorded), key)


def _sliced(session: Session, iterator: Any, recorded: list[Any]) -> Any:
    with session.quiet():
        try:
            all_samples = merge_batches(recorded)
        except NotMergedError as error:
            session.report_not_imposed(str(error))
            all_samples = None
    start = 0
    while True:
        with session.script_draws():
            batch = next(iterator, None)
        if batch is None:
            return
        end = start + rows_of_batch(batch)
        if all_samples is not None and end > rows_of_batch(all_samples):
            return
        yield batch if all_samples is None else decode_batch(rows_between(all_samples, start, end))
        start = end


def rows_between(batch: Any, start: int, end: int) -> Any:
    """The samples from `start` to `end` of an encoded batch."""
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() else batch
    if isinstance(batch, dict):
        return {key: rows_between(each, start, end) for key, each in batch.items()}
    if isinstance(batch, list | tuple):
        if not _has_columns(batch):
            return batch[start:end]
        return type(batch)(rows_between(each, start, end) for each in batch)
    return batch


# --- batches as containers of tensors, numbers and text

_PLAIN = (bool, int, float, str, type(None))
_MAX_ITEM_BYTES = 8  # torch has no long double


def encode_batch(value: Any) -> Any:
    """A copy of a batch in containers that torch.load supports with weights_only. Raises `NotMergedError`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= _MAX_ITEM_BYTES:
        return {"__numpy__": torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))}
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:  # not an enumeration, which torch.load does not support
        return value
    if type(value) is dict:
        return {encode_batch(key): encode_batch(each) for key, each in value.items()}
    if isinstance(value, collections.UserDict):  # such as BatchEncoding of transformers
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"__mapping__": kind, "items": encode_batch(dict(value.items()))}
    if type(value) in (list, tuple):
        container: Any = type(value)
        return container(encode_batch(each) for each in value)
    raise NotMergedError(f"batches contain {type(value).__name__}, which cannot be merged")


def decode_batch(value: Any) -> Any:
    """A copy of an encoded batch in its original types."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        if set(value) == {"__numpy__"}:
            return value["__numpy__"].numpy().copy()
        if set(value) == {"__mapping__", "items"}:
            module, _, name = value["__mapping__"].partition(":")
            items = decode_batch(value["items"])
            kind = getattr(sys.modules.get(module), name, None)  # it is imported: the script reads such batches
            return kind(items) if isinstance(kind, type) and issubclass(kind, collections.UserDict) else items
        return {key: decode_batch(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode_batch(each) for each in value)
    return value


def is_equal(first: Any, second: Any) -> bool:
    """Whether two encoded batches have the same content. NaN, which often marks a missing value, equals NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and _has_equal_elements(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return first == second or (first != first and second != second)


def _has_equal_elements(first: Any, second: Any) -> bool:
    if first.layout is not torch.strided:
        first, second = first.to_dense(), second.to_dense()
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())


def rows_of_batch(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        return next((rows for each in batch.values() if (rows := rows_of_batch(each))), 0)
    if isinstance(batch, list | tuple):
        return next((rows for each in batch if (rows := rows_of_batch(each))), 0)
    return 0


def num_bytes(batch: Any) -> int:
    """The memory of the tensors of a batch, in bytes."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(num_bytes(each) for each in batch.values())
    return sum(num_bytes(each) for each in batch) if isinstance(batch, list | tuple) else 0


def merge_batches(batches: list[Any]) -> Any:
    """Merge batches of several ranks: concatenates tensors along the first dimension, and lists of samples."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise NotMergedError("ranks read batches of different types")
    if isinstance(first, torch.Tensor):
        if not first.dim():
            if all(is_equal(batch, first) for batch in batches):
                return first
            raise NotMergedError(_VALUES_DIFFER)
        if any(batch.shape[1:] != first.shape[1:] or batch.dtype != first.dtype for batch in batches):
            raise NotMergedError(SHAPES_DIFFER)
        return torch.cat(batches)
    if isinstance(first, dict):
        if any(batch.keys() != first.keys() for batch in batches):
            raise NotMergedError("batches of the ranks have different keys")
        return {key: merge_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list | tuple):
        if any(len(batch) != len(first) for batch in batches) or not _has_columns(first):
            return type(first)(each for batch in batches for each in batch)
        return type(first)(merge_batches([batch[index] for batch in batches]) for index in range(len(first)))
    if all(is_equal(batch, first) for batch in batches):
        return first
    raise NotMergedError(_VALUES_DIFFER)


def _has_columns(batch: Any) -> bool:
    """Whether a list has one entry for each kind of value, such as `[images, labels]`, not one for each sample."""
    columns = [each for each in batch if isinstance(each, torch.Tensor) and each.dim()]
    if columns:
        return len({len(column) for column in columns}) == 1
    return any(isinstance(each, list | tuple | dict) for each in batch) and not all(
        isinstance(each, dict) for each in batch
    )


def _record_draws(session: Session, seeded_states: tuple[Any, Any, Any]) -> None:
    """Record the libraries whose generators have left their seeded state, because the dataset has drawn from them."""
    drawn_libraries = session.facts.setdefault("data_draws", [])
    numpy_state: Any = np.random.get_state(legacy=False)
    is_drawn = {
        "random": random.getstate() != seeded_states[0],
        "numpy": not _is_same_state(numpy_state, seeded_states[1]),
        "torch": not torch.equal(torch.get_rng_state(), seeded_states[2]),
    }
    drawn_libraries += [
        library for library, was_drawn in is_drawn.items() if was_drawn and library not in drawn_libraries
    ]


def _is_same_state(first: Any, second: Any) -> bool:
    """Whether two states of numpy's Mersenne twister are equal."""
    first, second = first["state"], second["state"]
    return first["pos"] == second["pos"] and bool((first["key"] == second["key"]).all())


# --- no workers


def _without_workers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a DataLoader without workers."""
    only_for_workers = {"num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"}
    kwargs = {name: value for name, value in kwargs.items() if name not in only_for_workers}
    position = list(inspect.signature(DataLoader).parameters).index("num_workers")
    return (*args[:position], 0, *args[position + 1 :]) if len(args) > position else args, kwargs


# --- one order


def _shuffle_in_one_order(session: Session) -> None:
    """Shuffle equally on any number of ranks, and seed the draws of a dataset by the sample and the pass."""
    for sampler_class in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        init: Any = sampler_class.__init__
        iterate: Any = sampler_class.__iter__

        @functools.wraps(init)
        def construct(self: Any, *args: Any, _init: Any = init, **kwargs: Any) -> None:
            _init(self, *args, **kwargs)
            self._everyrank_seed = torch.initial_seed()

        @functools.wraps(iterate)
        def iterating(self: Any, _iterate: Any = iterate) -> Any:
            if self.generator is None:  # a port sets one in the samplers that its ranks share
                self.generator = torch.Generator().manual_seed(self._everyrank_seed)
            return _iterate(self)

        sampler_class.__init__, sampler_class.__iter__ = construct, iterating  # type: ignore[method-assign]

    def seeded_sample(dataset: Any, index: Any) -> Any:
        with session.quiet():
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            number = int(index) if isinstance(index, int | np.integer) else zlib.crc32(repr(index).encode())
            # by pass, and not by how often this rank has read it, because another rank may have read it before
            seed = (number * 7919 + session.passes.get(id(dataset), 0)) % 2**31
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            seeded_states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
            try:
                return dataset[index]
            finally:
                if torch.is_grad_enabled():
                    _record_draws(session, seeded_states)
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])

    def fetched(self: Any, index: Any) -> Any:
        samples = (
            [seeded_sample(self.dataset, each) for each in index]
            if self.auto_collation
            else seeded_sample(self.dataset, index)
        )
        return self.collate_fn(samples)

    fetcher: Any = fetch._MapDatasetFetcher
    fetcher.fetch = fetched


def _shorten_passes(count: int) -> None:
    """Shorten each pass over a loader to its first batches and its last one, which may be smaller."""
    sampler: Any = BatchSampler
    iterate_batches = sampler.__iter__

    @functools.wraps(iterate_batches)
    def shortened(self: Any) -> Any:
        is_listed = hasattr(self.sampler, "__len__") and len(self) <= _MAX_LISTED
        batches_to_run = list(iterate_batches(self) if is_listed else itertools.islice(iterate_batches(self), count))
        yield from (
            batches_to_run if len(batches_to_run) <= count else [*batches_to_run[: count - 1], batches_to_run[-1]]
        )

    sampler.__iter__ = shortened
