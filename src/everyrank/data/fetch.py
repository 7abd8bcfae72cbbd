"""What one rank reads, fetched: data loader workers, pinned memory, the move to its device.

What is read, and in which order, is decided elsewhere.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from everyrank.errors import EveryrankError, WorkloadError
from everyrank.launch.supervisor import end_with_parent
from everyrank.world import World

__all__ = ["Batch", "map_tensors", "move", "pair_of", "read_all"]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch.

    input, target   as the workload's collate made them, on the rank's device
    size            real samples; 0: `input` holds one padding sample, of weight zero, because zero-length tensors
                    break user code
    start, total    where this part stands in the global batch, and the size of that
    parts           micro-batches that the global batch is cut into before it is cut over ranks
    places          of each sample in the update, whatever the ranks and micro-batches: by it dropout knows a sample;
                    (): from `start` on
    """

    input: Any
    target: Any
    size: int
    start: int
    total: int
    parts: int = 1
    places: Sequence[int] = ()


def read_all(read: Any, collate: Callable[[Any], Any], keys: Iterator[Any], world: World) -> Iterator[Any]:
    """What is found under each of these keys, in order, collated."""
    is_pinned = world.device.type == "cuda"
    if world.loader_workers == 0 and not is_pinned:
        return (collate(read.__getitems__(some)) for some in keys)  # what a DataLoader would do
    # The loader's workers start here, not at the first batch, which may stand in a timed region.
    return _told_by_workers(
        DataLoader(
            read,
            batch_sampler=_Once(keys),  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=world.loader_workers,
            pin_memory=is_pinned,
            timeout=world.timeout_seconds if world.loader_workers else 0,
            worker_init_fn=functools.partial(_begin_worker, os.getpid()),
        ),
        world.timeout_seconds,
    )


def _begin_worker(rank_process: int, _: int) -> None:
    """First in each worker of a loader.

    torch ends a worker whose parent is another than it was when the worker began: one that began in the moment in
    which its rank was killed would wait for ever. A fork server is the parent of what it forks, and ends it itself.
    """
    if multiprocessing.get_start_method() != "forkserver":
        end_with_parent(rank_process)
    # a request to stop may reach the whole process group; the rank still needs its workers to finish the update
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


def pair_of(content: Any) -> tuple[Any, Any]:
    """(input, target) of what a collate has made. Raises `WorkloadError` for anything else."""
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise WorkloadError("train_data: a sample must be (input, target)")
    return content[0], content[1]


class _Once:
    """Keys, each given out once, as a batch sampler."""

    def __init__(self, keys: Iterator[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self.keys


def move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
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
