"""Fetch the samples of one rank: data loader workers, pinned memory, the copy to its device.

parts.py and uneven.py decide which samples are read, and in which order.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from everyrank.errors import EveryrankError, WorkloadError
from everyrank.launch.supervisor import end_with_parent
from everyrank.world import World

__all__ = ["Batch", "fetch_all", "map_tensors", "move", "pair_of"]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch.

    input, target   as the workload's collate made them, on the rank's device
    size            real samples; if 0, `input` holds one dummy sample of weight zero, because empty tensors break
                    user code
    start, total    index of the first sample in the global batch, and the size of the global batch
    parts           number of micro-batches in the global batch
    sample_indices  index of each sample in the update, independent of ranks and micro-batches; dropout masks depend on
                    it; () for consecutive ones from `start`
    """

    input: Any
    target: Any
    size: int
    start: int
    total: int
    parts: int = 1
    sample_indices: Sequence[int] = ()


def fetch_all(read: Any, collate: Callable[[Any], Any], keys: Iterator[Any], world: World) -> Iterator[Any]:
    """Yield the collated samples of each key, in order."""
    is_pinned = world.device.type == "cuda"
    if world.loader_workers == 0 and not is_pinned:
        return (collate(read.__getitems__(batch)) for batch in keys)  # the same as a DataLoader, without its overhead
    # The loader's workers start here, not at the first batch, whose time may be measured.
    return _fetch_from_workers(
        DataLoader(
            read,
            batch_sampler=_KeySampler(keys),  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=world.loader_workers,
            pin_memory=is_pinned,
            timeout=world.timeout_seconds if world.loader_workers else 0,
            worker_init_fn=functools.partial(_init_worker, os.getpid()),
        ),
        world.timeout_seconds,
    )


def _init_worker(rank_process: int, _: int) -> None:
    """Set up a loader worker: end with its rank process, ignore stop signals.

    torch ends a worker whose parent has changed since the worker started. Without this function, a worker that starts
    while its rank is killed would wait forever. A fork server is the parent of its workers and ends them itself.
    """
    if multiprocessing.get_start_method() != "forkserver":
        end_with_parent(rank_process)
    # a stop signal may reach the whole process group, but the rank still needs its workers to finish the update
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _fetch_from_workers(loader: DataLoader[Any], timeout_seconds: float) -> Iterator[Any]:
    """Yield the batches of the workers. Shortens our own errors, whose text arrives with the worker's traceback."""
    fetched = iter(loader)  # starts the workers

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
                f"the data loader's workers gave no batch within {timeout_seconds:g} s; raise --timeout"
            ) from error

    return batches()


def pair_of(content: Any, data_name: str = "train_data", has_collate: bool = False) -> tuple[Any, Any]:
    """Return a collated batch as (input, target). Raises `WorkloadError` for anything else.

    `data_name` is the field of the workload for the message; `has_collate` is whether its own `collate` made the batch.
    """
    if not isinstance(content, tuple | list) or len(content) != 2:
        wrong = f"collate: the batch that it returns for {data_name}" if has_collate else f"{data_name}: a sample"
        raise WorkloadError(f"{wrong} must be (input, target)")
    return content[0], content[1]


class _KeySampler:
    """A batch sampler over an iterator of keys."""

    def __init__(self, keys: Iterator[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self.keys


def move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Copy to the device without waiting; cast floating-point tensors to `dtype`."""
    target_dtype = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, target_dtype, non_blocking=True)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists and dicts, which keep their types.

    The batch sizes of a `PackedSequence` are unchanged, because torch needs them on the CPU.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        changed = (map_tensors(item, change) for item in (value.data, value.sorted_indices, value.unsorted_indices))
        data, sorted_indices, unsorted_indices = changed
        return PackedSequence(data, value.batch_sizes, sorted_indices, unsorted_indices)
    if isinstance(value, dict | UserDict):
        result: Any = {} if type(value) is dict else copy.copy(value)  # a subclass may have attributes
        for key, item in value.items():
            result[key] = map_tensors(item, change)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))  # a named tuple
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    return value
