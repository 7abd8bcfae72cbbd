"""The state that an update changes: model, optimizer, schedule, loss scaler and averages.

Gradients are normalised by the global number of loss terms. Backward runs on sum / global_batch, because the raw sum
could overflow in fp16 (any constant that is equal on all ranks would do). Once the count is known, the gradients are
multiplied by global_batch / count, and by the number of ranks if a wrapper has averaged over them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from everyrank.data import Batch
from everyrank.errors import WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.ema import WeightEMA
from everyrank.parallel.loss import check_total
from everyrank.parallel.mesh import local_tensors
from everyrank.parallel.precision import LossScaler, make_loss_scaler
from everyrank.workload import Workload

__all__ = ["Trainable", "make_trainable"]


@dataclass
class Trainable:
    """The training state of this rank. Strategies step it, checkpoints save it, snapshots copy it.

    parameters        all parameters of the model, as laid out on this rank
    schedule          steps once per update, or on a plateau of the evaluation
    scaler            the loss scaler, for fp16
    ema               averages of the weights if the workload has an ema_decay; used by evaluation
    global_batch, clip_norm   those of the workload
    clip              (max_norm) -> None: clips the normalised gradients instead of the code here
    phase_observers   called with forward, backward or optimizer when a step enters that phase
    on_restore        called after a snapshot was restored, to reset other state
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    schedule: LRScheduler | None
    scaler: LossScaler | None
    ema: WeightEMA | None
    global_batch: int
    clip_norm: float | None
    clip: Callable[[float], object] | None = None
    phase_observers: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]])
    on_restore: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def enter_phase(self, phase: str) -> None:
        """Notify observers that the step enters forward, backward or optimizer."""
        for observer in self.phase_observers:
            observer(phase)

    def zero_grad(self, *others: nn.Parameter) -> None:
        """Clear the gradients of the last update, including those of `others`, which are not the model's."""
        self.enter_phase("forward")
        self.forget_gradients(*others)

    def forget_gradients(self, *others: nn.Parameter) -> None:
        """Free the memory of the gradients outside an update."""
        for parameter in (*self.parameters, *others):
            parameter.grad = None

    def iter_micro_batches(self, batches: Sequence[Batch]) -> Iterator[tuple[bool, Batch]]:
        """Yield (whether it is the last, micro-batch) for each micro-batch of an update."""
        for index, batch in enumerate(batches):
            self.enter_phase("forward")
            yield index == len(batches) - 1, batch

    def backward(self, loss: Tensor, *others: tuple[Tensor, Tensor]) -> None:
        """Run backward from loss * scale / global_batch, and from `others`: (tensor, its gradient)."""
        self.enter_phase("backward")
        # Passing the factor as the initial gradient equals multiplying the loss, without two more operators.
        scale = self.scaler.scale if self.scaler else 1.0
        first = _constant(scale / self.global_batch, loss.dtype, loss.device)
        tensors, gradients = zip((loss, first), *others, strict=True)
        torch.autograd.backward(tensors, gradients)
        self.enter_phase("optimizer")  # or the next micro-batch

    def optimizer_step(
        self, total: Tensor, num_averaged: int = 1, sum_grad_squares: Callable[[], Tensor] | None = None
    ) -> None:
        """Normalise the gradients by the global count, clip them, step optimizer and schedule.

        `total` is [sum, count] over all ranks, shape (2,). The gradients are those of sum / global_batch (times the
        loss scale), averaged over `num_averaged` ranks. `sum_grad_squares` returns the sum of their squares if ranks
        hold different parts of them (parallel/gradients.py).

        On CPU, before any change and on every rank, raises `WorkloadError` for a count of zero and
        `NotFiniteError` for a loss that is NaN or infinite. On CUDA reading the loss would synchronise the
        device: the loop checks it later, and with a count of zero the gradients are multiplied by 0.
        """
        factor = self._factor(total, num_averaged)
        clip_norm = self.clip_norm if self.clip is None else None
        needs_norm = clip_norm is not None or self.scaler is not None
        is_one = isinstance(factor, float) and factor == 1.0 and not needs_norm
        gradients = [] if is_one else local_tensors([p.grad for p in self.parameters if p.grad is not None])
        if needs_norm:
            norm = (sum_grad_squares().sqrt() if sum_grad_squares is not None else _norm(gradients, total)) * factor
            if self.scaler is not None:
                is_finite = bool(norm.isfinite())
                self.scaler.update(is_finite)
                if not is_finite:
                    self.skip_update()
                    return
            if clip_norm is not None:
                # the formula of torch.nn.utils.clip_grad_norm_
                factor = factor * torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        if gradients:
            _multiply(gradients, factor)
        if self.clip_norm is not None and self.clip is not None:
            self.clip(self.clip_norm)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        with _groups_by_mesh(self.optimizer), _WholeNumbers() if is_sharded else contextlib.nullcontext():
            self.optimizer.step()
        self.advance_schedule()

    def _factor(self, total: Tensor, num_averaged: int) -> float | Tensor:
        """Return the factor from gradients of sum / global_batch to gradients of the mean over all terms."""
        constant = num_averaged * self.global_batch / (self.scaler.scale if self.scaler else 1.0)
        if total.device.type == "cpu":
            loss_sum, count = total.tolist()
            check_total(loss_sum, count)
            return constant / count
        return torch.where(total[1] > 0, constant / total[1], 0.0)  # no terms, no update; the loop reports it

    def skip_update(self) -> None:
        """Skip this update, because its gradients have overflowed or there are none."""
        self.advance_schedule()

    def advance_schedule(self, steps: int = 1) -> None:
        """Advance a schedule that counts updates by this many steps."""
        if self.schedule is None or self.follows_evaluation:
            return
        with warnings.catch_warnings():
            # torch warns about a schedule that steps before the optimizer
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.schedule.step()

    @property
    def follows_evaluation(self) -> bool:
        """Whether the schedule depends on the evaluation loss at the end of each epoch, not on updates."""
        return isinstance(self.schedule, ReduceLROnPlateau)

    def report_eval_loss(self, eval_loss: float | None) -> None:
        """Step such a schedule with the exact evaluation loss, which is the same under every layout."""
        if isinstance(self.schedule, ReduceLROnPlateau) and eval_loss is not None:
            self.schedule.step(eval_loss)

    def snapshot(self) -> dict[str, Any]:
        """Copy the training state of this rank."""
        tensors = [*self.parameters, *self.model.buffers()]
        return {
            "tensors": [tensor.detach().clone() for tensor in local_tensors(tensors)],
            "ema": [average.clone() for average in local_tensors(self.ema.tensors)] if self.ema else [],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": copy.deepcopy(self.schedule.state_dict()) if self.schedule else None,
            "scaler": dataclasses.replace(self.scaler) if self.scaler else None,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore a snapshot and call `on_restore`."""
        self.load_snapshot(saved)
        for reset in self.on_restore:
            reset()

    @torch.no_grad()
    def load_snapshot(self, saved: dict[str, Any]) -> None:
        """Copy the values of a snapshot back."""
        tensors = local_tensors([*self.parameters, *self.model.buffers()])
        for tensor, copied in zip(tensors, saved["tensors"], strict=True):
            tensor.copy_(copied)
        if self.ema is not None:
            for tensor, copied in zip(local_tensors(self.ema.tensors), saved["ema"], strict=True):
                tensor.copy_(copied)
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        _keep_dtypes(self.optimizer, saved["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(saved["schedule"]))
        if self.scaler is not None:
            self.scaler.scale, self.scaler.good_steps = saved["scaler"].scale, saved["scaler"].good_steps


def _keep_dtypes(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restore dtypes after `load_state_dict`, which casts to the parameter's dtype although NAdam keeps a float32
    product.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and optimizer.state[parameter][key].dtype != value.dtype:
                optimizer.state[parameter][key] = value.clone()


def make_trainable(
    workload: Workload,
    layout: Layout,
    model: nn.Module,
    wrap: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
) -> Trainable:
    """Build the user's optimizer over the laid-out model; everything that replaces parameters must come before.

    `wrap` wraps the optimizer, and the schedule then drives the wrapper. Raises `WorkloadError` for an optimizer that
    cannot train the model.
    """
    optimizer = wrap(_make_optimizer(workload, model))
    schedule = workload.schedule(optimizer) if workload.schedule else None
    if isinstance(schedule, ReduceLROnPlateau) and workload.eval_data is None:
        raise WorkloadError(
            f"workload {workload.name}: ReduceLROnPlateau follows the loss of the evaluation; give eval_data, or a "
            "schedule that counts updates"
        )
    return Trainable(
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        schedule=schedule,
        scaler=make_loss_scaler(layout),
        ema=WeightEMA(workload.ema_decay, model) if workload.ema_decay is not None else None,
        global_batch=workload.global_batch,
        clip_norm=workload.clip_norm,
    )


def _make_optimizer(workload: Workload, model: nn.Module) -> Optimizer:
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
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        for group in optimizer.param_groups:
            # the fused kernels of these two do not support DTensor; other kernels give the same result
            if group.get("fused") and any(isinstance(parameter, DTensor) for parameter in group["params"]):
                group["fused"] = False
    return optimizer


class _WholeNumbers(TorchFunctionMode):
    """While entered, a number that Python reads from a DTensor is that of the whole tensor.

    An optimizer may read the norm of a parameter (`p.norm().item()`), and torch returns that of the local part. All
    ranks of the mesh step the same parameters in order, so gathering is no deadlock.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(), *args[1:])
        return func(*args, **(kwargs or {}))


_READS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__, Tensor.__int__}


@contextlib.contextmanager
def _groups_by_mesh(optimizer: Optimizer) -> Generator[None]:
    """While the optimizer steps, split parameter groups whose parameters lie on several device meshes.

    torch's foreach and fused kernels take tensors of one mesh. Outside the step, a schedule or a checkpoint sees the
    groups of the workload.
    """
    whole = optimizer.param_groups
    parts = [(group, parameters) for group in whole for parameters in _by_mesh(group["params"])]
    if len(parts) == len(whole):
        yield
        return
    split = [{**group, "params": parameters} for group, parameters in parts]
    optimizer.param_groups = split
    try:
        yield
    finally:
        for (group, _), new_group in zip(parts, split, strict=True):  # some optimizers store values in their groups
            group.update({key: value for key, value in new_group.items() if key != "params"})
        optimizer.param_groups = whole


def _by_mesh(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters by device mesh, in order; an empty list stays one empty group."""
    result: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        result.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(result.values()) or [[]]


def _check_parameters(workload: Workload, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `WorkloadError` for optimizer parameters that are not the model's: they would not be reduced over ranks."""
    known = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in known for parameter in given)
    if foreign:
        raise WorkloadError(
            f"workload {workload.name}: optimizer() has {foreign} parameters that are not the model's: take those of "
            "the model that it is called with, and make what else is trained a part of that model"
        )
    if not given and any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"workload {workload.name}: optimizer() has no parameters; give it model.parameters()")


def _norm(gradients: Sequence[Tensor], total: Tensor) -> Tensor:
    """Return the norm of gradients that this rank holds in full: float64, shape ()."""
    return torch.nn.utils.get_total_norm(gradients).to(total.device).double() if gradients else total.new_zeros(())


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients in place.

    On CUDA torch multiplies all gradients of one dtype and device in one kernel; others one by one.
    """
    if not isinstance(factor, Tensor) or factor.device.type == "cpu":
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage]  (documented)
        return
    for device, dtype in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
        same_kind = [gradient for gradient in gradients if gradient.device == device and gradient.dtype == dtype]
        torch._foreach_mul_(same_kind, factor.to(device, dtype, non_blocking=True))  # pyright: ignore[reportPrivateUsage]


@functools.lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)
