"""Read the samples of one rank: loader workers, augmentation randomness, pinned memory.

Everything that decides *which* samples are read is in parts.py and what stands above it; here they are only fetched.
"""

from __future__ import annotations

import collections
import functools
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from everyrank.data.order import Update
from everyrank.data.parts import Keys, Part, parts_for_evaluation, parts_for_updates
from everyrank.data.seeds import seed_sample
from everyrank.data.slicing import Slice
from everyrank.data.stream import Streamed, StreamReader
from everyrank.errors import EveryrankError, WorkloadError
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Batch", "batches_for_evaluation", "batches_for_updates", "map_tensors"]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch.

    input, target   as the workload's collate made them, on the rank's device
    size            real samples; 0: `input` holds one padding sample, of weight zero, because zero-length tensors
                    break user code
    start, total    where this part stands in the global batch, and the size of that
    parts           micro-batches that the global batch is cut into before it is cut over ranks
    """

    input: Any
    target: Any
    size: int
    start: int
    total: int
    parts: int = 1


def batches_for_updates(
    workload: Workload,
    dataset: Any,
    updates: Iterable[Update],
    reads: Slice,
    accumulate: int,
    world: World,
    dtype: torch.dtype,
    reverse: bool = False,
) -> Iterator[list[Batch]]:
    """For each update, this rank's part of each micro-batch; [] for a rank that reads nothing.

    `reverse` turns the samples round within each micro-batch: the same mathematics in another order of addition,
    which is how parity measures the noise floor.
    """
    if not reads.count:
        return ([] for _ in updates)
    parts = parts_for_updates(workload, dataset, updates, reads, accumulate, reverse)
    return _fetch(workload, dataset, parts, world, dtype)


def batches_for_evaluation(
    workload: Workload, dataset: Any, reads: Slice, world: World, dtype: torch.dtype
) -> Iterator[Batch]:
    """The rank's part of each batch of the evaluation data, in order; equally many on every rank that reads."""
    if not reads.count:
        return iter(())
    parts = parts_for_evaluation(workload, dataset, reads)
    return (batches[0] for batches in _fetch(workload, dataset, parts, world, dtype))


def _fetch(
    workload: Workload, dataset: Any, updates: Iterator[list[Part]], world: World, dtype: torch.dtype
) -> Iterator[list[Batch]]:
    """Fetch the parts of each update, in order, on this rank's device."""
    # The loader's workers ask for parts ahead of the loop, so what each part is waits here until it arrives.
    asked: collections.deque[list[Part]] = collections.deque()

    def keys() -> Iterator[Keys]:
        for parts in updates:
            asked.append(parts)
            for part in parts:
                yield part.keys

    takes_rows = _is_tensors(dataset) and workload.collate is None
    read: Any = _Rows(dataset) if takes_rows else _ByKey(dataset, workload.seed)
    if isinstance(dataset, Streamed):
        read = StreamReader(dataset, workload.seed)
    collate: Callable[[Any], Any] = _as_it_is if takes_rows else workload.collate or default_collate
    is_pinned = world.device.type == "cuda"
    if world.loader_workers == 0 and not is_pinned:
        fetched: Iterator[Any] = (collate(read.__getitems__(some)) for some in keys())  # what a DataLoader would do
    else:
        # The loader's workers start here, not at the first batch, which may stand in a timed region.
        fetched = _told_by_workers(
            DataLoader(
                read,
                batch_sampler=_Once(keys()),  # type: ignore[arg-type]
                collate_fn=collate,
                num_workers=world.loader_workers,
                pin_memory=is_pinned,
                timeout=world.timeout_seconds if world.loader_workers else 0,
                worker_init_fn=_leave_requests_to_the_rank,
            ),
            world.timeout_seconds,
        )
    return _batches(fetched, asked, functools.partial(_move, device=world.device, dtype=dtype))


def _leave_requests_to_the_rank(_: int) -> None:
    """A request to stop may reach the whole process group; the rank still needs its workers to finish the update."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _told_by_workers(loader: DataLoader[Any], timeout_seconds: float) -> Iterator[Any]:
    """What the workers fetch; an error of ours arrives with a traceback in its text, of which the end is kept."""
    fetched = iter(loader)  # here the workers start

    def batches() -> Iterator[Any]:
        try:
            yield from fetched
        except EveryrankError as error:
            message = str(error).rstrip().rpartition("\n")[2].partition(": ")[2]
            raise type(error)(message or str(error)) from None
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            raise EveryrankError(
                f"the data loader's workers gave no batch within {timeout_seconds:g} s (--timeout)"
            ) from error

    return batches()


def _batches(
    fetched: Iterator[Any], asked: collections.deque[list[Part]], move: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[Batch]]:
    """Put together what belongs to one update."""
    while True:
        batches: list[Batch] = []
        for content in fetched:
            part = asked[0][len(batches)]
            if not isinstance(content, tuple | list) or len(content) != 2:
                raise WorkloadError("train_data: a sample must be (input, target)")
            batches.append(
                Batch(
                    map_tensors(content[0], move),
                    map_tensors(content[1], move),
                    part.size,
                    part.start,
                    part.total,
                    len(asked[0]),
                )
            )
            if len(batches) == len(asked[0]):
                break
        if not batches:
            return
        asked.popleft()
        yield batches


class _Once:
    """Keys, each given out once, as a batch sampler."""

    def __init__(self, keys: Iterator[Keys]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Keys]:
        return self.keys


def _is_tensors(dataset: Any) -> bool:
    """Whether a sample is nothing but a row of some tensors (a subclass may have something to add to that)."""
    if not isinstance(dataset, TensorDataset) or hasattr(type(dataset), "__getitems__"):
        return False
    return type(dataset).__getitem__ is TensorDataset.__getitem__


class _Rows(Dataset[Any]):
    """A TensorDataset read by `Keys`: all rows of a batch in one go, the same batch as row by row and collated."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.tensors = dataset.tensors

    def __getitems__(self, keys: Keys) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[keys.samples] for tensor in self.tensors)


def _as_it_is(batch: Any) -> Any:
    return batch


class _ByKey(Dataset[Any]):
    """A dataset read by `Keys`, whose randomness is a function of (seed, epoch, sample)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.fetch_all: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self.is_random = not (_is_tensors(dataset) or getattr(dataset, "deterministic", False))

    def __getitems__(self, keys: Keys) -> list[Any]:
        if self.is_random:
            return [self._seeded(keys.epoch, sample) for sample in keys.samples]
        if self.fetch_all is not None:
            return self.fetch_all(keys.samples)
        return [self.dataset[sample] for sample in keys.samples]

    def _seeded(self, epoch: int, sample: int) -> Any:
        seed_sample(self.seed, epoch, sample)
        return self.dataset[sample]


def _move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """To the device without waiting; floating-point inputs in the precision of the model."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, wanted, non_blocking=True)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed; tuples, lists and dicts are gone through."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))  # a named tuple
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    return value
