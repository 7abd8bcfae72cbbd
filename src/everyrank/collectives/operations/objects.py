"""Operations on pickled objects. Unpickling can run code, so use them only between ranks that you trust."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from everyrank.collectives.operations.case import Call, Case

__all__ = [
    "make_all_gather_object",
    "make_broadcast_object_list",
    "make_gather_object",
    "make_scatter_object_list",
    "make_send_object_list",
]


def _objects(start: Callable[[list[Any]], Any], count: int, expected: list[bytes] | None) -> Call:
    """Return a call that fills a list of objects, each of `length` elements as bytes."""
    received: list[Any] = [None] * count

    def run() -> None:
        start(received)

    def reset() -> None:
        received[:] = [None] * count

    return Call(
        run, reset, lambda: 0 if expected is None else sum(a != b for a, b in zip(received, expected, strict=True))
    )


def _object(case: Case, rank: int) -> bytes:
    return bytes([rank % 255 + 1]) * (case.length * case.dtype.itemsize)


def make_broadcast_object_list(case: Case) -> Call:
    """Send the object of rank 0 to all ranks."""

    def start(received: list[Any]) -> None:
        received[:] = [_object(case, 0) if case.rank == 0 else None]
        dist.broadcast_object_list(received, group=case.group, group_src=0)

    return _objects(start, 1, [_object(case, 0)])


def make_all_gather_object(case: Case) -> Call:
    """Collect the objects of all ranks on every rank."""
    sent, expected = _object(case, case.rank), [_object(case, rank) for rank in range(case.size)]
    return _objects(lambda received: dist.all_gather_object(received, sent, group=case.group), case.size, expected)


def make_gather_object(case: Case) -> Call:
    """Collect the objects of all ranks on rank 0."""
    sent = _object(case, case.rank)
    expected = [_object(case, rank) for rank in range(case.size)] if case.rank == 0 else None

    def start(received: list[Any]) -> None:
        dist.gather_object(sent, received if case.rank == 0 else None, group=case.group, group_dst=0)

    return _objects(start, case.size, expected)


def make_scatter_object_list(case: Case) -> Call:
    """Send one object from rank 0 to each rank."""
    objects = [_object(case, rank) for rank in range(case.size)] if case.rank == 0 else None

    def start(received: list[Any]) -> None:
        dist.scatter_object_list(received, objects, group=case.group, group_src=0)

    return _objects(start, 1, [_object(case, case.rank)])


def make_send_object_list(case: Case) -> Call:
    """Send an object from rank 0 to rank 1."""

    def start(received: list[Any]) -> None:
        if case.rank == 0:
            dist.send_object_list([_object(case, 0)], group=case.group, group_dst=1)
        elif case.rank == 1:
            dist.recv_object_list(received, group=case.group, group_src=0)

    return _objects(start, 1, [_object(case, 0)] if case.rank == 1 else None)
