"""What loaders yield: recorded, put together from several ranks, or shuffled in one order."""

# The fetcher of map-style datasets is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data._utils import fetch

from everyrank.audit.watch.place import where
from everyrank.rerun.inside.session import Session

__all__ = [
    "NotMergedError",
    "decoded",
    "encoded",
    "install_batches",
    "is_equal",
    "merged",
    "num_bytes",
    "rows_of_batch",
]

_MOST_BYTES = 3e8
_MOST_LISTED = 100_000  # batches of a pass; an endless one has no last batch


class NotMergedError(Exception):
    """Parts of a batch that cannot be put together, with the reason."""


def install_batches(session: Session) -> None:
    """Hook DataLoader: number the loaders, record or impose each batch."""
    if session.settings["order"]:
        _one_order(session)
    if session.settings["pass_batches"]:
        _short_passes(session.settings["pass_batches"])
    init, iterate, length = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__
    made = 0
    passes: dict[int, int] = {}
    lengths: dict[int, int] = {}
    recorded_lengths = session.imposed[0]["facts"].get("lengths", {}) if session.imposed else {}

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        if session.settings["no_workers"] and session.is_active:
            args, kwargs = _without_workers(args, kwargs)
        init(self, *args, **kwargs)
        object.__setattr__(self, "_everyrank_number", made)
        if self.num_workers:
            session.facts.setdefault("with_workers", []).append(made)
        with contextlib.suppress(Exception), session.quiet():
            lengths[made] = length(self)
        session.facts.setdefault("loader_places", {})[made] = where()
        made += 1
        session.facts["lengths"] = lengths

    @functools.wraps(length)
    def measured(self: Any) -> int:
        number = getattr(self, "_everyrank_number", -1)
        is_imposed = number in recorded_lengths and session.is_active and not session.settings["by_rows"]
        return recorded_lengths[number] if is_imposed else length(self)

    @functools.wraps(iterate)
    def iterating(self: Any) -> Any:
        number = getattr(self, "_everyrank_number", -1)
        count = passes[number] = passes.get(number, -1) + 1
        session.passes[id(self.dataset)] = session.passes.get(id(self.dataset), -1) + 1
        if session.settings["by_rows"]:
            key = [number, count]
            recorded = [batch for loader_pass, batch, _ in session.imposed[0]["batches"] if loader_pass == key]
            with session.natural():
                iterator = iterate(self)
            return _ByRows(session, iterator, key, recorded) if recorded else _Recorded(session, iterator, key)
        if session.imposed:
            parts = [each["batches"] for each in session.imposed]
            key = [number, count]
            batches = [[batch for loader_pass, batch, _ in part if loader_pass == key] for part in parts]
            is_trained = any(number in each["facts"].get("trained", []) for each in session.imposed)
            if not is_trained and session.settings["evaluation_rank"] is not None:
                batches = batches[session.settings["evaluation_rank"] :][:1]
            if any(batches):
                return _Imposed(session, batches, number, is_trained)
            session.refuse(f"the {len(session.imposed)} ranks did not read pass {count} of loader {number}")
        # a batch sampler of the script's own gives each rank its part; torch's gives every rank the whole batch
        session.is_split = type(self.batch_sampler) is not BatchSampler
        return _Recorded(session, iterate(self), [number, count])

    DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__ = construct, iterating, measured


class _Recorded:
    """The iterator of a loader, which records its batches."""

    def __init__(self, session: Session, iterator: Any, key: list[int]) -> None:
        self._session, self._iterator, self._key = session, iterator, key

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        session = self._session
        session.has_begun = session.in_loader = True
        try:
            batch = next(self._iterator)
        finally:
            session.in_loader = False
        session.loader = self._key[0]
        session.batch_size = rows_of_batch(batch)
        session.num_batches += 1
        read = session.facts.setdefault("read", [])
        if session.is_active and len(read) < _MOST_LISTED:
            read.append([*self._key, session.num_all_backwards, where(), session.num_permutations])
        if session.is_active and not session.settings["order"] and not session.settings["only_rates"]:
            with session.quiet():
                try:
                    size = session.facts.get("bytes", 0) + num_bytes(batch)
                    if size > _MOST_BYTES:
                        raise NotMergedError(f"batches of more than {_MOST_BYTES / 1e6:.0f} MB")
                    session.facts["bytes"] = size
                    session.batches.append((self._key, encoded(batch), session.update))
                except NotMergedError as error:
                    session.refuse(str(error))
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class _Imposed:
    """Recorded batches of several ranks, put together one by one."""

    def __init__(self, session: Session, parts: list[list[Any]], number: int, is_trained: bool) -> None:
        self._session, self._parts, self._next = session, parts, 0
        self._number, self._is_trained = number, is_trained

    def __iter__(self) -> Any:
        return self

    def __len__(self) -> int:
        return max(len(part) for part in self._parts)

    def __next__(self) -> Any:
        session, index = self._session, self._next
        session.has_begun = True
        if index >= len(self):
            raise StopIteration
        self._next += 1
        session.loader = self._number
        batches = [part[index] if index < len(part) else None for part in self._parts]
        if None not in batches and all(is_equal(each, batches[0]) for each in batches[1:]):
            batches = batches[:1]  # every rank evaluates all samples, or has a part of the model
        session.rows = [0 if batch is None else rows_of_batch(batch) for batch in batches]
        session.batch_size = sum(session.rows)
        session.num_batches += 1
        present = [batch for batch in batches if batch is not None]
        with session.quiet():
            try:
                return decoded(merged(present))
            except NotMergedError as error:
                session.refuse(str(error))
                return decoded(present[0])


class _ByRows(_Recorded):
    """The recorded samples of a pass, in batches of the size that the loader itself would give."""

    def __init__(self, session: Session, iterator: Any, key: list[int], recorded: list[Any]) -> None:
        super().__init__(session, _sliced(session, iterator, recorded), key)


def _sliced(session: Session, iterator: Any, recorded: list[Any]) -> Any:
    with session.quiet():
        try:
            whole = merged(recorded)
        except NotMergedError as error:
            session.refuse(str(error))
            whole = None
    start = 0
    while True:
        with session.natural():
            batch = next(iterator, None)
        if batch is None:
            return
        end = start + rows_of_batch(batch)
        if whole is not None and end > rows_of_batch(whole):
            return
        yield batch if whole is None else decoded(rows_between(whole, start, end))
        start = end


def rows_between(batch: Any, start: int, end: int) -> Any:
    """Some samples of an encoded batch."""
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() else batch
    if isinstance(batch, dict):
        return {key: rows_between(each, start, end) for key, each in batch.items()}
    if isinstance(batch, list | tuple):
        if not _holds_columns(batch):
            return batch[start:end]
        return type(batch)(rows_between(each, start, end) for each in batch)
    return batch


# --- batches as containers of tensors, numbers and text

_PLAIN = (bool, int, float, str, type(None))


def encoded(value: Any) -> Any:
    """A copy of a batch in containers that torch.load reads back with weights_only. Raises `NotMergedError`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"__numpy__": torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: encoded(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        container: Any = type(value)
        return container(encoded(each) for each in value)
    raise NotMergedError(f"batches hold {type(value).__name__}, which is not put together")


def decoded(value: Any) -> Any:
    """A copy of an encoded batch."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        if set(value) == {"__numpy__"}:
            return value["__numpy__"].numpy().copy()
        return {key: decoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decoded(each) for each in value)
    return value


def is_equal(one: Any, other: Any) -> bool:
    """Whether two encoded batches have the same content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


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
    """The memory of the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(num_bytes(each) for each in batch.values())
    return sum(num_bytes(each) for each in batch) if isinstance(batch, list | tuple) else 0


def merged(parts: list[Any]) -> Any:
    """Batches of several ranks as one: tensors along their first dimension, lists of samples one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts):
        raise NotMergedError("ranks read batches of different types")
    if isinstance(first, torch.Tensor):
        if not first.dim():
            if all(torch.equal(part, first) for part in parts):
                return first
            raise NotMergedError("a batch holds a number without a batch dimension, and ranks differ in it")
        if any(part.shape[1:] != first.shape[1:] or part.dtype != first.dtype for part in parts):
            raise NotMergedError("ranks read samples of different shapes, such as texts padded to each batch's length")
        return torch.cat(parts)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise NotMergedError("batches of the ranks have different keys")
        return {key: merged([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts) or not _holds_columns(first):
            return type(first)(each for part in parts for each in part)
        return type(first)(merged([part[index] for part in parts]) for index in range(len(first)))
    if all(part == first for part in parts):
        return first
    raise NotMergedError("a batch holds a number without a batch dimension, and ranks differ in it")


def _holds_columns(batch: Any) -> bool:
    """Whether a list holds one entry for each kind of value, as `[images, labels]`, not one for each sample."""
    columns = [each for each in batch if isinstance(each, torch.Tensor) and each.dim()]
    if columns:
        return len({len(column) for column in columns}) == 1
    return any(isinstance(each, list | tuple | dict) for each in batch) and not all(
        isinstance(each, dict) for each in batch
    )


def _note_draws(session: Session, seeded: tuple[Any, Any, Any]) -> None:
    """Record the libraries whose generators are no longer in the state that they were seeded to."""
    drawn = session.facts.setdefault("data_draws", [])
    position: Any = np.random.get_state(legacy=False)
    is_drawn = {
        "random": random.getstate() != seeded[0],
        "numpy": not _is_same_state(position, seeded[1]),
        "torch": not torch.equal(torch.get_rng_state(), seeded[2]),
    }
    drawn += [library for library, drew in is_drawn.items() if drew and library not in drawn]


def _is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of numpy's Mersenne twister are equal."""
    one, other = one["state"], other["state"]
    return one["pos"] == other["pos"] and bool((one["key"] == other["key"]).all())


# --- no workers


def _without_workers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a DataLoader that reads in the process itself."""
    only_for_workers = {"num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"}
    kwargs = {name: value for name, value in kwargs.items() if name not in only_for_workers}
    position = list(inspect.signature(DataLoader).parameters).index("num_workers")
    return (*args[:position], 0, *args[position + 1 :]) if len(args) > position else args, kwargs


# --- one order


def _one_order(session: Session) -> None:
    """Shuffle alike on any number of ranks, and let what a dataset draws depend on the sample and the pass."""
    for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        init: Any = kind.__init__
        iterate: Any = kind.__iter__

        @functools.wraps(init)
        def construct(self: Any, *args: Any, _init: Any = init, **kwargs: Any) -> None:
            _init(self, *args, **kwargs)
            self._everyrank_seed = torch.initial_seed()

        @functools.wraps(iterate)
        def iterating(self: Any, _iterate: Any = iterate) -> Any:
            if self.generator is None:  # a port has given one to the samplers that its ranks share
                self.generator = torch.Generator().manual_seed(self._everyrank_seed)
            return _iterate(self)

        kind.__init__, kind.__iter__ = construct, iterating  # type: ignore[method-assign]

    def sample(dataset: Any, index: Any) -> Any:
        with session.quiet():
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            number = int(index) if isinstance(index, int | np.integer) else hash(index)
            # by pass, not by how often this rank has read it: in another pass another rank may have read it
            seed = (number * 7919 + session.passes.get(id(dataset), 0)) % 2**31
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            seeded = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
            try:
                return dataset[index]
            finally:
                if torch.is_grad_enabled():
                    _note_draws(session, seeded)
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])

    def fetched(self: Any, index: Any) -> Any:
        samples = [sample(self.dataset, each) for each in index] if self.auto_collation else sample(self.dataset, index)
        return self.collate_fn(samples)

    fetcher: Any = fetch._MapDatasetFetcher
    fetcher.fetch = fetched


def _short_passes(count: int) -> None:
    """A pass over a loader has its first batches and its last one, which may be smaller."""
    sampler: Any = BatchSampler
    batches = sampler.__iter__

    @functools.wraps(batches)
    def shortened(self: Any) -> Any:
        is_listed = hasattr(self.sampler, "__len__") and len(self) <= _MOST_LISTED
        kept = list(batches(self) if is_listed else itertools.islice(batches(self), count))
        yield from kept if len(kept) <= count else [*kept[: count - 1], kept[-1]]

    sampler.__iter__ = shortened
