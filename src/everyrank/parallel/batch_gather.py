"""Losses over the whole batch: the rows of all ranks in the order of their samples, with their gradient.

A contrastive loss compares each sample with all others of the batch, but a rank has only a part of it. In a loss or a
metric, `gather(x)` returns the rows of all ranks. Backward sums the gradients of all ranks for a row, on the rank that
has the sample.

    rank 0   x0 x1 x2 ─┐                    ┌─► loss of 0, 1, 2 against all
                       ├─► x0 x1 x2 x3 x4 ──┤
    rank 1   x3 x4 ────┘                    └─► loss of 3, 4 against all

The ranks and their numbers of rows follow from the batch whose loss is computed, so only the rows are sent.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from everyrank.data import Batch, Slice, cut
from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.layout import DATA_AXES
from everyrank.parallel.mesh import Mesh
from everyrank.world import World
from everyrank.world.collectives import all_gather as everywhere
from everyrank.world.collectives import sum_over_ranks

__all__ = ["first_row", "gather", "loss_scope", "raise_on_all_ranks", "watch_gather"]


@dataclass(frozen=True)
class _LossScope:
    """The slice of a batch whose loss is computed now, and its ranks; errors may be stored in `deferred_errors`."""

    batch: Batch
    mesh: Mesh
    order: str
    deferred_errors: list[UnsupportedLayoutError] | None


_scope: ContextVar[_LossScope | None] = ContextVar("everyrank_rows", default=None)
_gather_calls: ContextVar[list[bool] | None] = ContextVar("everyrank_rows_asked", default=None)


@contextlib.contextmanager
def loss_scope(
    batch: Batch, mesh: Mesh, order: str = "global", deferred_errors: list[UnsupportedLayoutError] | None = None
) -> Generator[None]:
    """Enter the computation of a user's loss or metric on this slice of a batch.

    An unsupported `gather` raises `UnsupportedLayoutError`. If only some ranks compute the loss, the error is stored in
    `deferred_errors` instead, because raising would leave the other ranks waiting.
    """
    token = _scope.set(_LossScope(batch, mesh, order, deferred_errors))
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def watch_gather() -> Generator[list[bool]]:
    """Yield a list that is not empty after a loss in the block has called `gather`."""
    calls: list[bool] = []
    token = _gather_calls.set(calls)
    try:
        yield calls
    finally:
        _gather_calls.reset(token)


def _record_gather_call() -> None:
    calls = _gather_calls.get()
    if calls is not None:
        calls.append(True)


def gather(values: Tensor) -> Tensor:
    """Gather the rows of the global batch, (B, ...), from this rank's rows, (b, ...), in the order of the samples.

    Use it for losses over the batch, for example contrastive ones. Call it in `Workload.loss` or a metric, equally
    often on every rank, with one row for each sample and the same row shape on all ranks. It is differentiable:
    backward sums the gradients of all ranks. On one device, and outside of a training, it returns its argument.
    `first_row` is the position of this rank's rows.

    Args:
        values: One row for each sample of this rank, (b, ...).

    Raises:
        WorkloadError: The tensor does not have one row for each sample.
        UnsupportedLayoutError: The loss does not see the whole batch of samples: with accumulate, in a pipeline, under
            context, with order="shard", or with asynchronous trainers.

    Examples:
        >>> import torch
        >>> from everyrank import first_row, gather
        >>> def loss(images, texts):
        ...     logits = images @ gather(texts).T
        ...     target = first_row() + torch.arange(len(images))
        ...     return torch.nn.functional.cross_entropy(logits, target, reduction="sum"), len(images)
        >>> loss(torch.eye(3), torch.eye(3))
        (tensor(1.6543), 3)
    """
    _record_gather_call()
    scope = _scope.get()
    if scope is None or _is_refused(scope):
        return values
    values = values.full_tensor() if isinstance(values, DTensor) else values
    batch, reads = scope.batch, scope.mesh.data_slice
    if values.dim() == 0 or len(values) != max(batch.size, 1):
        raise WorkloadError(
            f"gather: a tensor of shape {tuple(values.shape)} for {max(batch.size, 1)} samples; give it one row for "
            "each sample, (B, ...), several views one after the other"
        )
    if reads.count == 1:
        return values
    # reuse the group of batch norm, because creating a group is a collective of all ranks
    group = scope.mesh.group(*DATA_AXES)
    return _Gather.apply(values, _sizes(batch.total, reads.count), reads.index, group)


def first_row() -> int:
    """Return the row of `gather(x)` at which this rank's rows start; 0 on one device.

    Sample i of the rank is row `first_row() + i`. A dummy sample (of weight zero, on a rank without samples) is row 0.
    Raises the same errors as `gather`.

    Examples:
        >>> from everyrank import first_row
        >>> first_row()
        0
    """
    scope = _scope.get()
    if scope is None or _is_refused(scope) or not scope.batch.size:
        return 0
    return scope.batch.start


def _is_refused(scope: _LossScope) -> bool:
    """Whether the batch cannot be gathered here. Raises `UnsupportedLayoutError` or defers it."""
    reason = ""
    if scope.batch.parts > 1:
        reason = (
            f"a loss over the whole batch, of which accumulate or a pipeline makes {scope.batch.parts} micro-batches: "
            "it would be another loss; use ddp, zero1 or fsdp with accumulate=1 (recompute saves memory, too)"
        )
    elif scope.mesh.size("context") > 1:
        reason = "a loss over the whole batch, and under context a rank has parts of sequences; use ddp, zero1 or fsdp"
    elif not scope.mesh.in_lockstep:
        reason = (
            "a loss over the whole batch, for which ranks that train by themselves would wait for each other; use ddp, "
            "or updates=sync with parameter_server"
        )
    elif scope.mesh.data_slice.count == 1 and scope.batch.size != scope.batch.total:
        reason = (
            "a loss over the whole batch, and one process that stands for several ranks has the rows of one at a time"
        )
    elif scope.order == "shard" and scope.mesh.data_slice.count > 1:
        reason = "order='shard' gives each rank samples of its own, in no order of the batch; use order='global'"
    if not reason:
        return False
    error = UnsupportedLayoutError(f"gather: {reason}")
    if scope.deferred_errors is None:
        raise error
    scope.deferred_errors.append(error)
    return True


def raise_on_all_ranks(refused: list[UnsupportedLayoutError], world: World, is_first: bool) -> None:
    """Raise on every rank the errors that some ranks have deferred. A collective in the first update only."""
    if not is_first:
        if refused:  # a loss that calls gather only sometimes
            raise refused[0]
        return
    if not float(sum_over_ranks(torch.tensor([len(refused)]), world)):
        return
    rows = everywhere(torch.tensor(list(str(next(iter(refused), "")).encode()), dtype=torch.uint8), world)
    raise UnsupportedLayoutError(next(text for row in rows if (text := bytes(row.tolist()).decode())))


@functools.lru_cache(maxsize=64)
def _sizes(total: int, count: int) -> tuple[int, ...]:
    """Return the number of rows of each rank."""
    return tuple(len(cut(total, Slice(index, count))) for index in range(count))


class _Gather(torch.autograd.Function):
    """Rows of this rank (b, ...) -> rows of all ranks (B, ...).

    torch.distributed.nn.all_gather needs parts of equal size, and its gradient is wrong with gloo.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, sizes: tuple[int, ...], index: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, ctx.shape, ctx.rows = group, local.shape, slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        kind = torch.uint8 if local.dtype is torch.bool else local.dtype
        padded = torch.zeros(max(sizes), *local.shape[1:], dtype=kind, device=local.device)
        padded[: sizes[index]] = local[: sizes[index]]  # a dummy sample is not a row of the batch
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded, group=group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).to(local.dtype)

    @staticmethod
    @once_differentiable  # a second derivative would lack the contributions of other ranks
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad: Tensor = grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)  # the sum of gradients in float16 could overflow
        total = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        local_grad = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        own_rows = total[ctx.rows]
        local_grad[: len(own_rows)] = own_rows
        return local_grad, None, None, None
