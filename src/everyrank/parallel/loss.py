"""Loss and metrics of a micro-batch as (sum, count), because only sums can be added up over ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.errors import NotFiniteError, UnsupportedLayoutError, WorkloadError
from everyrank.parallel.batch_gather import loss_scope
from everyrank.parallel.mesh import Mesh, full_tensor
from everyrank.workload import Workload

__all__ = ["check_total", "compute_loss", "evaluate_batch"]


def compute_loss(
    workload: Workload,
    output: Any,
    batch: Batch,
    mesh: Mesh,
    deferred_errors: list[UnsupportedLayoutError] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss sum with its graph, shape (); local (sum, count), detached, float64, shape (2,)).

    `deferred_errors` is for ranks that compute the loss while others wait for its gradient: see
    `parallel.batch_gather.loss_scope`. Raises `WorkloadError` for a loss that does not return (sum, count).
    """
    with loss_scope(batch, mesh, workload.order, deferred_errors):
        loss_sum, count = _pair(workload.loss(output, batch.target), "loss")
    loss_sum = full_tensor(loss_sum)  # of split logits; every rank has the whole sum
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        raise WorkloadError(f"loss: the sum must be a tensor without dimensions, not {_shape(loss_sum)}")
    if not batch.size:  # a padding sample
        loss_sum, count = loss_sum * 0.0, 0.0
    if loss_sum.device.type == "cpu":
        return loss_sum, torch.tensor((loss_sum.item(), float(count)), dtype=torch.float64)
    return loss_sum, _local_sum_on_device(loss_sum, count)


def _local_sum_on_device(loss_sum: Tensor, count: Any) -> Tensor:
    """Put (sum, count) on the device of the loss: reading it, or copying a Python number, would synchronise."""
    is_there = isinstance(count, Tensor) and count.device == loss_sum.device
    share = torch.full((2,), 0.0 if is_there else float(count), dtype=torch.float64, device=loss_sum.device)
    share[0] = loss_sum.detach()
    if is_there:
        share[1] = count
    return share


@torch.no_grad()
def evaluate_batch(workload: Workload, output: Any, batch: Batch, mesh: Mesh | None = None) -> Tensor:
    """Return the rank's local (sum, count) of the loss in row 0 and of each metric; float64, shape (1 + metrics, 2).

    Without a `mesh`, `gather` returns only the local rows, so that no other rank is waited for.
    """
    shares = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    functions = [("loss", workload.loss), *workload.metrics.items()]
    with loss_scope(batch, mesh) if mesh is not None else contextlib.nullcontext():
        for row, (name, function) in enumerate(functions):
            # of a padding sample too, for the ranks that gather its batch
            value, count = _pair(function(output, batch.target), name)
            if batch.size:
                shares[row, 0], shares[row, 1] = float(value), float(count)
    return shares


def check_total(total: float, count: float) -> None:
    """Raise `WorkloadError` for a loss without terms, `NotFiniteError` for NaN or infinity."""
    if count == 0:
        raise WorkloadError("the loss counted 0 terms over all ranks; there is nothing to average over")
    if not math.isfinite(total):
        raise NotFiniteError(f"the loss is {total / count}")


def _pair(value: Any, source: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise WorkloadError(
            f"{source}: it returned {_shape(value)}; it must return (sum over the terms, number of terms)"
        )
    return value[0], value[1]


def _shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
