"""Records the events of an update: backward, clipping, gradient scaler, optimizer step, zero_grad, schedule."""

# The hooks replace parts of torch that are private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from everyrank.audit.events import (
    Backward,
    BackwardEnd,
    Clip,
    DiscardedGradients,
    OptimizerMade,
    PlateauStep,
    ScheduleStep,
)
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, harmless, tensors
from everyrank.audit.watch.source_location import user_line

__all__ = ["install_sharding", "install_steps"]


def install_steps(
    recorder: Recorder,
    losses: Losses,
    gradients: Gradients,
    on_backward: Callable[[], None],
    on_step: Callable[[], None],
) -> None:
    """Hook each update. Calls `on_backward` at each backward, and `on_step` after each recorded optimizer step."""
    hooks = _StepHooks(recorder, losses, gradients)
    _watch_backward(hooks, on_backward)
    _watch_clipping(hooks)
    _watch_scaler(hooks)
    _watch_optimizers(recorder, gradients, on_step)
    _watch_zero_grad(hooks)
    _watch_schedules(hooks)


class _StepHooks:
    """Records calls of the functions that this file replaces."""

    def __init__(self, recorder: Recorder, losses: Losses, gradients: Gradients) -> None:
        self.recorder, self.losses, self.gradients = recorder, losses, gradients

    @harmless("losses of what all_gather gave")
    def gathered(self, roots: Any, line: str) -> Backward | None:
        """The event of a backward whose loss depends on the result of an all_gather; None for any other backward."""
        with self.recorder.muted():
            for root in tensors(roots):
                gather = self.losses.gathers.gathered.get(id(root))
                if gather is not None and root.numel() == 1:
                    is_detached = bool(gather.sources)
                    loss = float(root)
                    return Backward(line=line, gathered_at=gather.line, is_detached=is_detached, gathered_loss=loss)
        return None

    @harmless("clipping")
    def record_clip(self, norm: Any, before: dict[str, Any]) -> None:
        """Record the norm that a clipping function returns, and the gradients before clipping."""
        recorder, gradients = self.recorder, self.gradients
        with recorder.muted():
            gathered_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            value = float(gathered_norm) if gathered_norm is not None else None
        scale = 1.0 if gradients.is_unscaled else gradients.loss_scale
        recorder.write(Clip(line=user_line(), norm=value, scale=scale))
        gradients.unclipped_grads = {**before, **(gradients.unclipped_grads or {})}

    @harmless("the scale of a gradient scaler")
    def record_scale(self, scaler: Any) -> None:
        """Read the scale of a gradient scaler."""
        with self.recorder.muted():
            self.gradients.loss_scale = float(scaler._scale)

    @harmless("gradients that zero_grad discards")
    def record_zero_grad(self, optimizer: Any) -> None:
        """Record gradients that zero_grad clears before a step has used them."""
        recorder, gradients = self.recorder, self.gradients
        if not recorder.is_muted and gradients.is_wanted:
            gradients.zeroed_at = user_line()
        if not gradients.backward_grads or recorder.is_muted:
            return
        names = {gradients.names.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        discarded = {micro for micro, name in gradients.backward_grads if name in names}
        if discarded and not gradients.is_in_closure:  # a line search evaluates the loss more often than it steps
            recorder.write(DiscardedGradients(line=user_line(), num_backwards=len(discarded)))
        gradients.backward_grads = {
            key: value for key, value in gradients.backward_grads.items() if key[1] not in names
        }

    @harmless("the metric of ReduceLROnPlateau")
    def record_plateau(self, schedule: Any, numbers: list[Any], *, is_prepared: bool) -> None:
        """Record the metric that ReduceLROnPlateau gets."""
        with self.recorder.muted():
            values = [float(number) for number in numbers]
        for value in values:
            self.recorder.write(
                PlateauStep(line=user_line(), value=value, schedule=id(schedule), is_prepared=is_prepared)
            )


def _watch_backward(hooks: _StepHooks, on_backward: Callable[[], None]) -> None:
    recorder, losses, gradients = hooks.recorder, hooks.losses, hooks.gradients
    autograd_backward = torch.autograd.backward

    @functools.wraps(autograd_backward)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_muted:
            return autograd_backward(*args, **kwargs)
        on_backward()
        line = user_line()
        gradients.begin_backward()
        roots = args[0] if args else kwargs.get("tensors")
        recorder.write(hooks.gathered(roots, line) or Backward(line=line))
        try:
            with recorder.during(f"backward at {line}"):
                return autograd_backward(*args, **kwargs)
        finally:
            scaling_lines = list(dict.fromkeys(losses.scaling_lines))
            recorder.write(BackwardEnd(losses=losses.backward_done(), scaling_lines=scaling_lines))
            recorder.micro += 1

    torch.autograd.backward = backward


def _watch_clipping(hooks: _StepHooks) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, _clipping(getattr(torch.nn.utils, name), hooks))
        setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", functools.partial(_watch_fsdp_clipping, hooks))


def _watch_fsdp_clipping(hooks: _StepHooks, module: Any) -> None:
    fsdp = module.FullyShardedDataParallel
    clip_grad_norm = fsdp.clip_grad_norm_

    @functools.wraps(clip_grad_norm)
    def clip(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_wanted = hooks.gradients.is_wanted
        with hooks.recorder.muted():
            before = hooks.gradients.step_samples(self.parameters()) if is_wanted else {}
        out = clip_grad_norm(self, *args, **kwargs)
        hooks.record_clip(out, before)
        return out

    fsdp.clip_grad_norm_ = clip


def _clipping(function: Any, hooks: _StepHooks) -> Any:
    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameter_list = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        is_wanted = hooks.gradients.is_wanted
        with hooks.recorder.muted():
            before = hooks.gradients.step_samples(parameter_list) if is_wanted else {}
        out = function(parameter_list, *args, **kwargs)
        hooks.record_clip(out, before)
        return out

    return clip


def _watch_scaler(hooks: _StepHooks) -> None:
    recorder, gradients = hooks.recorder, hooks.gradients
    scaler: Any = torch.amp.GradScaler
    scale, unscale, update, step = scaler.scale, scaler.unscale_, scaler.update, scaler.step

    def scaling(self: Any, outputs: Any) -> Any:
        out = scale(self, outputs)
        if self.is_enabled():
            hooks.record_scale(self)
        return out

    def unscaling(self: Any, optimizer: Any) -> Any:
        gradients.is_unscaled = True
        with recorder.muted():
            return unscale(self, optimizer)

    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.muted():
            return update(self, *args, **kwargs)

    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recorder.update
        out = step(self, optimizer, *args, **kwargs)
        if recorder.update == before and self.is_enabled():
            gradients.start_update()
        return out

    scaler.scale, scaler.unscale_, scaler.update, scaler.step = scaling, unscaling, updating, stepping


def _watch_optimizers(recorder: Recorder, gradients: Gradients, on_step: Callable[[], None]) -> None:
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    stack: list[Any] = []  # an optimizer may step other optimizers; the outermost one has all parameters

    def record(optimizer: Any) -> None:
        gradients.step(optimizer)
        on_step()

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        stack.append(optimizer)
        if len(stack) > 1 and stack[0] is not optimizer:
            return None
        del stack[1:]
        if recorder.is_skipped:
            recorder.update += 1
        if recorder.is_muted:
            return None
        closure = kwargs.get("closure") or next((arg for arg in args if callable(arg) and arg is not optimizer), None)
        if closure is None or isinstance(closure, Optimizer):
            record(optimizer)
            return None
        gradients.is_in_closure = True
        watched = _recording_closure(closure, functools.partial(record, optimizer))
        replaced = tuple(watched if arg is closure else arg for arg in args)
        return replaced, {name: watched if arg is closure else arg for name, arg in kwargs.items()}

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        gradients.is_in_closure = False
        if stack and stack[-1] is optimizer:
            stack.pop()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _recording_closure(closure: Any, record: Callable[[], None]) -> Any:
    """Wrap a closure so that it records the gradients after its first forward and backward."""
    was_recorded: list[bool] = []

    @functools.wraps(closure)
    def watched(*args: Any, **kwargs: Any) -> Any:
        out = closure(*args, **kwargs)
        if not was_recorded:
            was_recorded.append(True)
            record()
        return out

    return watched


def _watch_schedules(hooks: _StepHooks) -> None:
    """Record each step of a schedule, except for schedules that another schedule steps."""
    recorder = hooks.recorder
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    depth: list[int] = []
    made_schedules = weakref.WeakSet[Any]()  # a mark on the schedule itself would get into its state_dict

    def watched(schedule_class: Any) -> None:
        step = schedule_class.__dict__.get("step")
        if step is None:
            return

        @functools.wraps(step)
        def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "") if not depth else ""
            is_prepared = caller.startswith("accelerate.")
            if not depth and self in made_schedules:
                name = type(self).__name__
                recorder.write(ScheduleStep(line=user_line(), schedule=id(self), name=name, is_prepared=is_prepared))
            elif not depth and isinstance(self, ReduceLROnPlateau):
                hooks.record_plateau(self, [*args[:1], *kwargs.values()][:1], is_prepared=is_prepared)
            depth.append(id(self))
            try:
                return step(self, *args, **kwargs)
            finally:
                depth.pop()

        schedule_class.step = stepping

    for schedule_class in [LRScheduler, *_all_subclasses(LRScheduler)]:
        watched(schedule_class)
    _remember_constructed(LRScheduler, made_schedules)


def _all_subclasses(base_class: Any) -> list[Any]:
    return [cls for subclass in base_class.__subclasses__() for cls in (subclass, *_all_subclasses(subclass))]


def _remember_constructed(schedule_class: Any, made_schedules: weakref.WeakSet[Any]) -> None:
    """Remember schedules that are constructed, because a schedule steps once in its constructor."""
    initial_step = schedule_class._initial_step

    @functools.wraps(initial_step)
    def made(self: Any) -> None:
        initial_step(self)
        made_schedules.add(self)

    schedule_class._initial_step = made


def _watch_zero_grad(hooks: _StepHooks) -> None:
    optimizer: Any = torch.optim.Optimizer
    zero_grad, init = optimizer.zero_grad, optimizer.__init__

    def zeroing(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.record_zero_grad(self)
        return zero_grad(self, *args, **kwargs)

    def made(self: Any, params: Any, defaults: Any) -> None:
        init(self, params, defaults)
        hooks.recorder.write(OptimizerMade(line=user_line()))

    optimizer.zero_grad, optimizer.__init__ = zeroing, made


def install_sharding(gradients: Gradients) -> bool:
    """Hook the parameters that fully_shard gathers, before it reduces their gradients.

    Returns whether this version of torch allows it, because there is no public hook. Without it the gradients under
    fully_shard are not checked.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        init = FSDPParam.init_unsharded_param
    except (ImportError, AttributeError):
        return False
    hooked: set[int] = set()

    def gathered(self: Any) -> None:
        init(self)
        whole = self._unsharded_param
        gradients.gathered(whole, self.sharded_param)
        if id(whole) not in hooked and whole.requires_grad:
            hooked.add(id(whole))
            name = str(gradients.names.get(id(self.sharded_param), self._param_fqn))
            whole.register_hook(gradients.leaf_hook(name))

    FSDPParam.init_unsharded_param = gathered
    return True
