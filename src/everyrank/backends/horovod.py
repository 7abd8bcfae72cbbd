"""Horovod's collectives as a process group of torch, so that `everyrank comm` can compare them with other backends.

Horovod matches the calls of ranks by name, in any order. So each call gets a number as its name and starts at once.
Horovod has no reduce, gather and scatter, and no send and receive. Its group consists of all ranks, and
`world.start_horovod` has initialised it before.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.backends.group import PythonGroup
from everyrank.backends.operation_queue import OperationQueue, Steps
from everyrank.backends.transport import Transport
from everyrank.errors import CannotRunError

__all__ = ["make_horovod_group"]

_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
_REDUCTIONS = {"sum": "Sum", "avg": "Average", "min": "Min", "max": "Max", "product": "Product"}


def make_horovod_group(
    _: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: datetime.timedelta, name: str
) -> PythonGroup:
    """Return a process group over Horovod, which is already initialised.

    Raises `CannotRunError` if its ranks are not those of the group.
    """
    hvd: Any = importlib.import_module("horovod.torch")
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise CannotRunError("backend horovod: only the group of all ranks is supported")
    collectives, queue = HorovodCollectives(hvd, rank, size, name), OperationQueue(ranks, timeout.total_seconds())
    return PythonGroup(Transport("horovod", collectives, _NoMessages(), queue, lambda: None), rank, size, name)


class HorovodCollectives:
    """Implements `GroupCollectives` with Horovod's asynchronous calls."""

    def __init__(self, hvd: Any, rank: int, size: int, group_name: str) -> None:
        self.hvd = hvd
        self.other_ranks = [other for other in range(size) if other != rank]
        # all ranks call the same collectives in the same order, so their names match
        self.names = (f"{group_name}/{number}" for number in itertools.count())

    def _start(self, start: Callable[..., int], tensor: Tensor, *args: Any, **kwargs: Any) -> int:
        """Start a call of Horovod, and return its handle. Raises `RuntimeError` for an unsupported dtype."""
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"Horovod does not support {tensor.dtype}")
        return start(tensor, *args, name=next(self.names), **kwargs)

    def _until_done(self, handle: int) -> Steps:
        """Wait for a call; the steps return its output."""
        missing = list(self.other_ranks)
        while not self.hvd.poll(handle):
            yield missing
        return self.hvd.synchronize(handle)

    def _reduction(self, name: str, tensor: Tensor) -> Any:
        if name not in _REDUCTIONS or (name == "avg" and not tensor.is_floating_point()):
            raise RuntimeError(f"Horovod has no reduction {name} of {tensor.dtype}")
        return getattr(self.hvd, _REDUCTIONS[name])

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """Reduce `tensor` over all ranks, in place."""
        operation = self._reduction(reduction, tensor)
        return self._until_done(self._start(self.hvd.allreduce_async_, tensor, op=operation))

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Copy `tensor` of the root to all ranks."""
        return self._until_done(self._start(self.hvd.broadcast_async_, tensor, root))

    def all_gather(self, outputs: list[Tensor], input_tensor: Tensor) -> Steps:
        """Copy `input_tensor` of each rank to `outputs` of all ranks."""
        return self._copy_out(self._start(self.hvd.allgather_async, input_tensor), outputs)

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], reduction: str) -> Steps:
        """Reduce `inputs[r]` over all ranks into `output` of rank r."""
        operation = self._reduction(reduction, output)
        if reduction not in ("sum", "avg"):
            raise RuntimeError(f"Horovod has no reduce_scatter with reduction {reduction}")
        return self._copy_out(self._start(self.hvd.reducescatter_async, torch.cat(inputs), op=operation), [output])

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        """Copy `inputs[s]` of rank r to `outputs[r]` of rank s."""
        lengths = torch.tensor([len(chunk) for chunk in inputs], dtype=torch.int32)
        return self._copy_out(self._start(self.hvd.alltoall_async, torch.cat(inputs), lengths), outputs)

    def _copy_out(self, handle: int, outputs: list[Tensor]) -> Steps:
        """Wait for a call, and split the one tensor that Horovod returns into the outputs."""
        result = yield from self._until_done(handle)
        if isinstance(result, tuple):  # all_to_all returns the received lengths, too
            result = result[0]
        for output, chunk in zip(outputs, result.split([len(output) for output in outputs]), strict=True):
            output.copy_(chunk)

    def barrier(self) -> Steps:
        """Sum one element over all ranks, because `hvd.barrier` would block all other pending calls."""
        return self.all_reduce(torch.zeros(1), "sum")

    def reduce(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `RuntimeError`: Horovod has no reduce to one rank."""
        raise RuntimeError("Horovod has no reduce: its all_reduce ends on every rank")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `RuntimeError`: Horovod has no gather to one rank."""
        raise RuntimeError("Horovod has no gather: its all_gather ends on every rank")

    def scatter(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `RuntimeError`: Horovod has no scatter from one rank."""
        raise RuntimeError("Horovod has no scatter")


class _NoMessages:
    """Implements `GroupMessages` by errors, because Horovod has no send and receive."""

    def send(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("Horovod has no messages between two ranks")

    receive = send

    def queues(self) -> list[OperationQueue]:
        return []
