"""Horovod's own collectives as a process group of torch's: `everyrank comm` measures them beside the others.

Horovod brings together what has the same name, whatever else is under way: a call is numbered, and on its way at once.
It has no collective that ends on one rank alone (reduce, gather, scatter), and no messages; its group is that of all
ranks, started before (`world.start_horovod`).
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
    """A process group over Horovod, initialised before. Raises `CannotRunError` where its ranks are not these."""
    hvd: Any = importlib.import_module("horovod.torch")
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise CannotRunError("backend horovod: its group is that of all ranks")
    collectives, queue = HorovodCollectives(hvd, rank, size, name), OperationQueue(ranks, timeout.total_seconds())
    return PythonGroup(Transport("horovod", collectives, _NoMessages(), queue, lambda: None), rank, size, name)


class HorovodCollectives:
    """`GroupCollectives` of transport.py says what each does."""

    def __init__(self, hvd: Any, rank: int, size: int, group_name: str) -> None:
        self.hvd = hvd
        self.others = [other for other in range(size) if other != rank]
        self.names = (f"{group_name}/{number}" for number in itertools.count())  # every rank calls the same

    def _started(self, start: Callable[..., int], tensor: Tensor, *arguments: Any, **options: Any) -> int:
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"Horovod does not carry {tensor.dtype}")
        return start(tensor, *arguments, name=next(self.names), **options)

    def _until_done(self, handle: int) -> Steps:
        """Gives what Horovod gives for it."""
        missing = list(self.others)
        while not self.hvd.poll(handle):
            yield missing
        return self.hvd.synchronize(handle)

    def _reduction(self, name: str, tensor: Tensor) -> Any:
        if name not in _REDUCTIONS or (name == "avg" and not tensor.is_floating_point()):
            raise RuntimeError(f"Horovod has no reduction {name} of {tensor.dtype}")
        return getattr(self.hvd, _REDUCTIONS[name])

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """As `GroupCollectives` says."""
        operation = self._reduction(reduction, tensor)
        return self._until_done(self._started(self.hvd.allreduce_async_, tensor, op=operation))

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """As `GroupCollectives` says."""
        return self._until_done(self._started(self.hvd.broadcast_async_, tensor, root))

    def all_gather(self, parts: list[Tensor], sent: Tensor) -> Steps:
        """Horovod gives one tensor of all parts."""
        return self._hand_out(self._started(self.hvd.allgather_async, sent), parts)

    def reduce_scatter(self, received: Tensor, parts: list[Tensor], reduction: str) -> Steps:
        """Horovod takes one tensor of all parts."""
        operation = self._reduction(reduction, received)
        if reduction not in ("sum", "avg"):
            raise RuntimeError(f"Horovod has no reduce_scatter by {reduction}")
        return self._hand_out(self._started(self.hvd.reducescatter_async, torch.cat(parts), op=operation), [received])

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """Horovod takes one tensor of all parts, and how long each is."""
        lengths = torch.tensor([len(chunk) for chunk in sent], dtype=torch.int32)
        return self._hand_out(self._started(self.hvd.alltoall_async, torch.cat(sent), lengths), received)

    def _hand_out(self, handle: int, parts: list[Tensor]) -> Steps:
        whole = yield from self._until_done(handle)
        if isinstance(whole, tuple):  # of all_to_all with the lengths that came
            whole = whole[0]
        for output, chunk in zip(parts, whole.split([len(output) for output in parts]), strict=True):
            output.copy_(chunk)

    def barrier(self) -> Steps:
        """A sum of one element: `hvd.barrier` would hold up whatever else is pending."""
        return self.all_reduce(torch.zeros(1), "sum")

    def reduce(self, *_: Any, **__: Any) -> NoReturn:
        """Horovod has none that ends on one rank."""
        raise RuntimeError("Horovod has no reduce: its all_reduce ends on every rank")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Horovod has none that ends on one rank."""
        raise RuntimeError("Horovod has no gather: its all_gather ends on every rank")

    def scatter(self, *_: Any, **__: Any) -> NoReturn:
        """Horovod has none that ends on one rank."""
        raise RuntimeError("Horovod has no scatter")


class _NoMessages:
    """`GroupMessages` of transport.py, which Horovod has not."""

    def send(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("Horovod has no messages between two ranks")

    receive = send

    def queues(self) -> list[OperationQueue]:
        return []
