"""Operations that all ranks of a group call together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.collectives.algorithms import ALGORITHMS
from everyrank.collectives.messages import Messages
from everyrank.collectives.operations.case import Call, Case, writing_call

__all__ = [
    "make_all_gather",
    "make_all_gather_into_tensor",
    "make_all_reduce",
    "make_all_to_all",
    "make_all_to_all_uneven",
    "make_barrier",
    "make_broadcast",
    "make_gather",
    "make_monitored_barrier",
    "make_reduce",
    "make_reduce_scatter",
    "make_scatter",
]

# torch 2.13 renamed these functions and warns about the old names
_ALL_GATHER_SINGLE: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
_REDUCE_SCATTER_SINGLE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]


def make_broadcast(case: Case) -> Call:
    """Send the tensor of rank 0 to all ranks."""
    tensor, initial = case.empty(), case.values(0) if case.rank == 0 else case.empty()
    return writing_call(
        case,
        lambda is_async: dist.broadcast(tensor, group=case.group, group_src=0, async_op=is_async),
        tensor,
        initial,
        case.values(0),
    )


def make_reduce(case: Case) -> Call:
    """Reduce the tensors of all ranks to rank 0."""
    tensor = case.empty()
    expected = case.reduced() if case.rank == 0 else None  # undefined on other ranks
    return writing_call(
        case,
        lambda is_async: dist.reduce(tensor, group=case.group, group_dst=0, op=case.op, async_op=is_async),
        tensor,
        case.values(case.rank),
        expected,
    )


def make_all_reduce(case: Case) -> Call:
    """Reduce the tensors of all ranks to all ranks, with the backend or one of `ALGORITHMS`."""
    tensor = case.empty()

    def start(is_async: bool) -> Any:
        if case.algorithm is None:
            return dist.all_reduce(tensor, op=case.op, group=case.group, async_op=is_async)
        return ALGORITHMS[case.algorithm].all_reduce(tensor, Messages(case.rank, range(case.size), case.group))

    return writing_call(case, start, tensor, case.values(case.rank), case.reduced())


def make_gather(case: Case) -> Call:
    """Concatenate the parts of all ranks on rank 0."""
    whole, local = case.empty(), case.values(case.rank, case.length // case.size)
    parts = list(whole.split(len(local))) if case.rank == 0 else None
    expected = _joined(case) if case.rank == 0 else None
    return writing_call(
        case,
        lambda is_async: dist.gather(local, parts, group=case.group, group_dst=0, async_op=is_async),
        whole,
        case.empty(),
        expected,
    )


def _joined(case: Case) -> Tensor:
    return torch.cat([case.values(rank, case.length // case.size) for rank in range(case.size)])


def make_scatter(case: Case) -> Call:
    """Split the tensor of rank 0 into a part for each rank."""
    local, whole = case.empty(case.length // case.size), case.values(0)
    parts = list(whole.split(len(local))) if case.rank == 0 else None
    return writing_call(
        case,
        lambda is_async: dist.scatter(local, parts, group=case.group, group_src=0, async_op=is_async),
        local,
        case.empty(len(local)),
        whole[case.rank_slice(case.rank)],
    )


def make_all_gather(case: Case) -> Call:
    """Return the parts of all ranks on every rank, as a list."""
    whole, local = case.empty(), case.values(case.rank, case.length // case.size)
    parts = list(whole.split(len(local)))
    return writing_call(
        case,
        lambda is_async: dist.all_gather(parts, local, group=case.group, async_op=is_async),
        whole,
        case.empty(),
        _joined(case),
    )


def make_all_gather_into_tensor(case: Case) -> Call:
    """Concatenate the parts of all ranks in one tensor on every rank."""
    whole, local = case.empty(), case.values(case.rank, case.length // case.size)
    return writing_call(
        case,
        lambda is_async: _ALL_GATHER_SINGLE(whole, local, group=case.group, async_op=is_async),
        whole,
        case.empty(),
        _joined(case),
    )


def make_reduce_scatter(case: Case) -> Call:
    """Reduce the tensors of all ranks and split the result into a part for each rank."""
    local, whole = case.empty(case.length // case.size), case.values(case.rank)
    return writing_call(
        case,
        lambda is_async: _REDUCE_SCATTER_SINGLE(local, whole, op=case.op, group=case.group, async_op=is_async),
        local,
        case.empty(len(local)),
        case.reduced()[case.rank_slice(case.rank)],
    )


def make_all_to_all(case: Case) -> Call:
    """Send part s of rank r to rank s, where it becomes part r."""
    received = case.empty()
    expected = torch.cat([case.values(rank)[case.rank_slice(case.rank)] for rank in range(case.size)])
    sent = case.values(case.rank)
    return writing_call(
        case,
        lambda is_async: dist.all_to_all_single(received, sent, group=case.group, async_op=is_async),
        received,
        case.empty(),
        expected,
    )


def make_all_to_all_uneven(case: Case) -> Call:
    """Send s + 1 units from each rank to rank s."""
    unit = case.length // (case.size * (case.size + 1) // 2)
    send_counts = [unit * (index + 1) for index in range(case.size)]
    receive_counts = [unit * (case.rank + 1)] * case.size
    sent, received = case.values(case.rank, sum(send_counts)), case.empty(sum(receive_counts))
    start = sum(send_counts[: case.rank])
    expected = torch.cat(
        [case.values(rank, sum(send_counts))[start : start + send_counts[case.rank]] for rank in range(case.size)]
    )
    return writing_call(
        case,
        lambda is_async: dist.all_to_all_single(
            received, sent, receive_counts, send_counts, group=case.group, async_op=is_async
        ),
        received,
        case.empty(len(received)),
        expected,
    )


def make_barrier(case: Case) -> Call:
    """Wait until all ranks have called it."""
    nothing = case.empty(0)
    return writing_call(
        case, lambda is_async: dist.barrier(group=case.group, async_op=is_async), nothing, nothing.clone(), None
    )


def make_monitored_barrier(case: Case) -> Call:
    """Return a barrier in which rank 0 can name the missing ranks; only gloo has it."""
    nothing = case.empty(0)
    return writing_call(case, lambda _: dist.monitored_barrier(group=case.group), nothing, nothing.clone(), None)
