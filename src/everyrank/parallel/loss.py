"""Loss and metrics of a micro-batch as (sum, count), because sums can be added over ranks and means cannot."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import NotFiniteError, UnsupportedLayoutError, WorkloadError
from everyrank.parallel.batch_gather import loss_scope
from everyrank.parallel.mesh import Mesh, full_tensor, local_tensor
from everyrank.workload import Workload

__all__ = ["check_total", "compute_loss", "evaluate_batch"]


def compute_loss(
    workload: Workload,
    output: Any,
    batch: Batch,
    mesh: Mesh,
    deferred_errors: list[UnsupportedLayoutError] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss sum (differentiable, without dimensions), and a detached float64 tensor [sum, count].

    Both are of this rank's micro-batch. If the user's loss calls `everyrank.gather` where it is not supported, the
    error is appended to `deferred_errors`, if given: raising it would leave the other ranks waiting (see
    `parallel.batch_gather.loss_scope`). Raises `WorkloadError` for a loss that does not return (sum, count).
    """
    with loss_scope(batch, mesh, workload.order, deferred_errors):
        loss_sum, count = _sum_and_count(workload.loss(output, batch.target), "loss")
    loss_sum = full_tensor(loss_sum)  # with sharded logits, the loss is a DTensor; every rank needs its full value
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        raise WorkloadError(f"loss: the sum must be a tensor without dimensions, not {_describe(loss_sum)}")
    if not loss_sum.requires_grad and torch.is_grad_enabled() and float(count) == 0:
        loss_sum = loss_sum + _zero_of(output)  # other ranks have terms, and this one takes part in their collectives
    if not batch.size:  # a dummy sample adds nothing, but its backward takes part in the collectives
        loss_sum, count = loss_sum * 0.0, 0.0
    if loss_sum.device.type == "cpu":
        return loss_sum, torch.tensor((loss_sum.item(), float(count)), dtype=torch.float64)
    return loss_sum, _sum_and_count_on_device(loss_sum, count)


def _zero_of(output: Any) -> float | Tensor:
    """Return a zero that depends on each tensor of the output, so that backward gives gradients of zero."""
    tensors: list[Tensor] = []
    map_tensors(output, lambda tensor: tensors.append(tensor) or tensor)
    trained = [local_tensor(tensor) for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]
    return sum(tensor.reshape(-1)[:0].sum() for tensor in trained)


def _sum_and_count_on_device(loss_sum: Tensor, count: Any) -> Tensor:
    """Return (sum, count) on the device of the loss.

    Reading the loss, or copying a Python number to the device, would synchronise.
    """
    is_on_device = isinstance(count, Tensor) and count.device == loss_sum.device
    sum_and_count = torch.full((2,), 0.0 if is_on_device else float(count), dtype=torch.float64, device=loss_sum.device)
    sum_and_count[0] = loss_sum.detach()
    if is_on_device:
        sum_and_count[1] = count
    return sum_and_count


@torch.no_grad()
def evaluate_batch(workload: Workload, output: Any, batch: Batch, mesh: Mesh | None = None) -> Tensor:
    """Return the rank's local (sum, count) of the loss in row 0, and of each metric in the rows after it.

    The tensor is float64. Without a `mesh`, `gather` returns only the local rows, so this rank waits for no other.
    Raises `WorkloadError` for a metric that does not return one sum and its count.
    """
    sums_and_counts = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    functions = [("loss", workload.loss), *workload.metrics.items()]
    with loss_scope(batch, mesh) if mesh is not None else contextlib.nullcontext():
        for row, (name, function) in enumerate(functions):
            # a dummy sample is evaluated, too, because other ranks wait for this one in `gather`
            value, count = _sum_and_count(function(output, batch.target), name)
            if isinstance(value, Tensor) and value.numel() != 1:
                raise WorkloadError(
                    f"{name}: it returned {_describe(value)} as the sum; add up its numbers with .sum()"
                )
            if batch.size:
                sums_and_counts[row, 0], sums_and_counts[row, 1] = float(value), float(count)
    return sums_and_counts


def check_total(loss_sum: float, count: float) -> None:
    """Raise `WorkloadError` for a loss without terms, `NotFiniteError` for NaN or infinity."""
    if count == 0:
        raise WorkloadError(
            "the loss counted 0 terms over all ranks, so it has no mean; each batch needs a target that is not masked"
        )
    if not math.isfinite(loss_sum):
        raise NotFiniteError(f"the loss is {loss_sum / count}")


def _sum_and_count(value: Any, function_name: str) -> tuple[Any, Any]:
    """Check that a loss or metric has returned a pair, and return it. The error contains `function_name`."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise WorkloadError(
            f"{function_name}: it returned {_describe(value)}; it must return (sum over the terms, number of terms)"
        )
    return value[0], value[1]


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
