"""What all strategies do around the collectives that make them different: loss, normalise, clip, step, evaluate.

Gradients are normalised by the global number of loss terms. Backward runs on sum / global_batch (any constant would do
that is equal on all ranks and in one process; the raw sum would overflow in fp16). Once the count is known the
gradients are multiplied by global_batch / count, and by the number of ranks where a wrapper has averaged over them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everyrank.data import Batch
from everyrank.errors import NotFiniteError, UnfitError, WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.mesh import Mesh, local_tensors
from everyrank.parallel.phases import enter_phase
from everyrank.parallel.rows import taking_loss
from everyrank.workload import Workload

__all__ = [
    "LossScale",
    "backward",
    "begin",
    "evaluate_batch",
    "full_state",
    "loss_of",
    "make_optimizer",
    "make_scale",
    "passes",
    "update",
]


@dataclass
class LossScale:
    """Loss scaling for fp16: gradients too small for fp16 are scaled up, and updates that overflow are skipped.

    One scale for all ranks, moved by the global norm: each rank's own scaler could skip where another steps.
    A skipped update still advances the schedule: the learning rate stays a function of the step alone.

    Source: Micikevicius et al. 2018.
    """

    scale: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    def moved(self, finite: bool) -> None:
        """Grow after many good steps, halve after an overflow."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


def make_scale(layout: Layout) -> LossScale | None:
    """The loss scale of a layout; None for the precisions that need none."""
    return LossScale() if layout.precision == "fp16" else None


def make_optimizer(workload: Workload, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """The person's optimizer over `model`, and the schedule that steps once per update, or on a plateau."""
    optimizer: object = workload.optimizer(model)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        fix = "; a workload has one: make groups of parameters in it" if isinstance(optimizer, tuple | list) else ""
        raise WorkloadError(f"workload {workload.name}: optimizer() returned {kind}, not a torch.optim.Optimizer{fix}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"workload {workload.name}: {kind} computes the loss several times in a step, which an update here cannot; "
            "use an optimizer that steps on the gradients it finds (SGD, AdamW)"
        )
    _check_parameters(workload, model, optimizer)
    for group in optimizer.param_groups:
        # torch's kernels for many tensors at once take tensors of one kind; one by one is the same arithmetic
        if len({p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}) > 1:
            group.update({key: False for key in ("foreach", "fused") if key in group})
    schedule = workload.schedule(optimizer) if workload.schedule else None
    if isinstance(schedule, ReduceLROnPlateau) and workload.eval_data is None:
        raise WorkloadError(
            f"workload {workload.name}: ReduceLROnPlateau follows the loss of the evaluation; give eval_data, or a "
            "schedule that counts updates"
        )
    return optimizer, schedule


def _check_parameters(workload: Workload, model: nn.Module, optimizer: Optimizer) -> None:
    """Others than the model's own would be trained by no rank, or by each for itself."""
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in given)
    if foreign:
        raise WorkloadError(
            f"workload {workload.name}: optimizer() has {foreign} parameters that are not the model's: take those of "
            "the model that it is called with, and make what else is trained a part of that model"
        )
    if not given and any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"workload {workload.name}: optimizer() has no parameters; give it model.parameters()")


def begin(parameters: Sequence[nn.Parameter]) -> None:
    """Forget the last update's gradients."""
    enter_phase("forward")
    for parameter in parameters:
        parameter.grad = None


def passes(batches: Sequence[Batch]) -> Iterator[tuple[bool, Batch]]:
    """(whether it is the last, micro-batch) for each micro-batch of an update."""
    for index, batch in enumerate(batches):
        enter_phase("forward")
        yield index == len(batches) - 1, batch


def loss_of(
    workload: Workload, output: Any, batch: Batch, mesh: Mesh, later: list[UnfitError] | None = None
) -> tuple[Tensor, Tensor]:
    """(sum, count) of one forward pass: the sum with its graph, and both detached as float64, shape (2,).

    `later` is for ranks that take the loss while others wait for its gradient: see `parallel.rows.taking_loss`.
    """
    with taking_loss(batch, mesh, workload.order, later):
        total, count = _pair(workload.loss(output, batch.target), "loss")
    if isinstance(total, DTensor):  # of split logits; every rank has the whole sum
        total = total.full_tensor()
    if not isinstance(total, Tensor) or total.dim() != 0:
        raise WorkloadError(f"loss: the sum must be a tensor without dimensions, not {_shape(total)}")
    if not batch.size:
        total, count = total * 0.0, 0.0
    if total.device.type == "cpu":
        return total, torch.tensor((total.item(), float(count)), dtype=torch.float64)
    shares = torch.empty(2, dtype=torch.float64, device=total.device)  # reading the loss would make the device wait
    shares[0] = total.detach()
    shares[1] = count
    return total, shares


def backward(workload: Workload, scale: LossScale | None, loss: Tensor, *others: tuple[Tensor, Tensor]) -> None:
    """Backward from loss * scale / global_batch, and from `others`: (tensor, its gradient)."""
    enter_phase("backward")
    # A gradient to start from is what multiplying the loss would come to, without the two operators.
    first = _constant((scale.scale if scale else 1.0) / workload.global_batch, loss.dtype, loss.device)
    tensors, gradients = zip((loss, first), *others, strict=True)
    torch.autograd.backward(tensors, gradients)
    enter_phase("optimizer")  # or the forward pass of another micro-batch


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise WorkloadError(
            f"{what}: it returned {_shape(value)}; it must return (sum over the terms, number of terms)"
        )
    return value[0], value[1]


def _shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@functools.lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def update(
    workload: Workload,
    total: Tensor,
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    schedule: LRScheduler | None,
    scale: LossScale | None,
    averaged: int = 1,
    squares: Callable[[], Tensor] | None = None,
) -> None:
    """Normalise the gradients by the global count, clip them, step.

    `total` is [sum, count] over all ranks. The gradients in `parameters` are those of sum / global_batch (times the
    loss scale), averaged over `averaged` ranks. `squares` gives the sum of their squares where other ranks hold other
    parts of them (parallel/norm.py).

    Raises `WorkloadError` for a count of zero and `NotFiniteError` for a loss that is none, before anything is
    changed and on every rank alike. (On CUDA reading the loss would make the device wait: the loop looks later.)
    """
    constant = averaged * workload.global_batch / (scale.scale if scale else 1.0)
    if total.device.type == "cpu":
        loss_sum, count = total.tolist()
        check_total(loss_sum, count)
        factor = constant / count
    else:
        factor = torch.where(total[1] > 0, constant / total[1], 0.0)  # no terms, no update; the loop will say so
    is_done = isinstance(factor, float) and factor == 1.0 and workload.clip_norm is None and scale is None
    gradients = [] if is_done else local_tensors([p.grad for p in parameters if p.grad is not None])
    if workload.clip_norm is not None or scale is not None:
        if squares is not None:
            norm = squares().sqrt() * factor
        else:
            norm = torch.nn.utils.get_total_norm(gradients).double() * factor if gradients else total.new_zeros(())
        if scale is not None:
            finite = bool(norm.isfinite())
            scale.moved(finite)
            if not finite:
                with warnings.catch_warnings():
                    # torch takes a schedule that steps before the first optimizer step for a mistake
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    _advance(schedule)
                return
        if workload.clip_norm is not None:
            # the formula of torch.nn.utils.clip_grad_norm_
            factor = factor * torch.clamp(workload.clip_norm / (norm + 1e-6), max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage]  (documented)
    optimizer.step()
    _advance(schedule)


def check_total(total: float, count: float) -> None:
    """Raise for a loss that has no terms, or is no number."""
    if count == 0:
        raise WorkloadError("the loss counted 0 terms over all ranks; there is nothing to average over")
    if not math.isfinite(total):
        raise NotFiniteError(f"the loss is {total / count}")


def _advance(schedule: LRScheduler | None) -> None:
    if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):  # that one waits for an evaluation
        schedule.step()


@torch.no_grad()
def evaluate_batch(workload: Workload, output: Any, batch: Batch, mesh: Mesh | None = None) -> Tensor:
    """The rank's shares of (sum, count): the loss in row 0, each metric after it; float64, shape (1 + metrics, 2).

    Without a `mesh` a function over the whole batch gets the rank's own part: then no other rank is waited for.
    """
    shares = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    functions = [("loss", workload.loss), *workload.metrics.items()]
    with taking_loss(batch, mesh) if mesh is not None else contextlib.nullcontext():
        for row, (name, function) in enumerate(functions):
            # of a borrowed sample too, for the ranks that gather its batch
            total, count = _pair(function(output, batch.target), name)
            if batch.size:
                shares[row, 0], shares[row, 1] = float(total), float(count)
    return shares


def full_state(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """The state of a model that every rank holds whole: on rank 0's CPU, {} elsewhere."""
    if rank != 0:
        return {}
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
