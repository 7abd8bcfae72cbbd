"""Records losses, gradients, parameters, learning rates, buffers and untrained parameters of each update."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from everyrank.audit.watch.source_location import user_line, user_lines
from everyrank.rerun.inside.batches import NotMergedError, encode_batch
from everyrank.rerun.inside.modules import ModuleNames
from everyrank.rerun.inside.objects import Counters, running_statistics, user_objects
from everyrank.rerun.inside.session import Session
from everyrank.rerun.shards import join_shards

__all__ = ["install_step_hooks"]

_MAX_MISSING_COUNTERS = 9


class _Steps:
    def __init__(self, session: Session, modules: ModuleNames) -> None:
        self.session, self.modules = session, modules
        self.losses: list[float] = []
        self.backward_lines: list[str] = []
        self.current_update: dict[str, Any] = {}
        self.stepped_parameter_ids: set[int] = set()
        self.parameter_names: dict[int, str] = {}
        # by the optimizer's id, for each parameter group: its learning rate and momenta
        self.script_settings: dict[int, list[dict[str, Any]]] = {}
        self.constructed_at: dict[int, str] = {}  # the line that constructs each optimizer, by its id
        self.counters = Counters()

    @property
    def records_tensors(self) -> bool:
        """Whether gradients, parameters, buffers and untrained parameters of this update are recorded."""
        return self.session.update < self.session.settings["num_detailed"]

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Record an optimizer before its step, and impose the recorded learning rates."""
        session = self.session
        if not session.is_active:
            return
        self.restore_learning_rates(optimizer)  # if its previous step raised an error, which the script caught
        with session.quiet(), torch.no_grad():
            self.record_states()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            unknown = [p for p in parameters if id(p) not in self.parameter_names]
            if unknown:
                self.parameter_names = self.modules.parameters()
                for number, parameter in enumerate(parameters):
                    self.parameter_names.setdefault(id(parameter), f"{type(optimizer).__name__}: parameter {number}")
            self.stepped_parameter_ids |= {id(p) for p in parameters}
            if self.records_tensors:
                session.copies = self.modules.copies(self.stepped_parameter_ids)
                self.record_dead_parameters(optimizer, parameters)
                self.record_step_before_backward(optimizer, parameters)
                if not session.update:
                    session.facts["constructed_at"] = self.modules.lines()
                    session.facts["batch_norms"] = self.modules.num_batch_norms()
            self.current_update = {
                "losses": self.losses,
                "backwards": self.backward_lines,
                "step": user_line(),
                "gradients": {},
                "before": {},
                "after": {},
                "rates": [float(group.get("lr") or 0.0) for group in optimizer.param_groups],  # Adafactor may have None
                "momenta": [_as_encoded(group) for group in _group_settings(optimizer, *_MOMENTA)],
                "batches": session.num_batches,
                "states": {},
                "optimizer": self.constructed_at.get(id(optimizer), ""),
            }
            if self.records_tensors:
                named = {self.parameter_names[id(p)]: p for p in parameters}
                self.current_update["gradients"] = {
                    name: None if p.grad is None else self.stored_copy(_reduced(p.grad)) for name, p in named.items()
                }
                self.current_update["before"] = {name: self.stored_copy(p) for name, p in named.items()}
            self.impose_learning_rates(optimizer)
            self.losses, self.backward_lines = [], []

    def record_dead_parameters(self, optimizer: Any, parameters: list[Any]) -> None:
        """Record an optimizer that has n parameters without gradient outside modules, if n others lack an optimizer.

        These others are parameters of modules, and have gradients.
        """
        facts = self.session.facts
        if "dead" in facts:
            return
        module_parameters = self.modules.parameters()
        num_outside_modules = sum(
            id(parameter) not in module_parameters and parameter.grad is None for parameter in parameters
        )
        unstepped = self.modules.unstepped(self.stepped_parameter_ids)
        if num_outside_modules and num_outside_modules == len(unstepped):
            facts["dead"] = [
                self.constructed_at.get(id(optimizer), user_line()),
                num_outside_modules,
                len(parameters),
                unstepped,
            ]

    def record_step_before_backward(self, optimizer: Any, parameters: list[Any]) -> None:
        """Record a step with zero gradients before the first backward. Adam counts it in its bias correction."""
        facts = self.session.facts
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self.backward_lines and not self.session.num_all_backwards:
            if gradients and not any(bool(shard_of(gradient).any()) for gradient in gradients):
                facts.setdefault("empty_steps", {})[id(optimizer)] = user_line()
        elif id(optimizer) in facts.get("empty_steps", {}) and "counted" not in facts:
            states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
            counts = [float(state["step"]) for state in states if "step" in state]
            facts["counted"] = [facts["empty_steps"][id(optimizer)], max(counts, default=0.0), user_line()]

    def impose_learning_rates(self, optimizer: Any) -> None:
        """Set the learning rates and momenta that the first recorded rank had in this step.

        `restore_learning_rates` sets those of the script again.
        """
        is_imposed = self.session.imposed and not self.session.settings["by_rows"]
        recorded_updates = self.session.imposed[0]["updates"] if is_imposed else []
        if self.session.update < len(recorded_updates):
            rates = recorded_updates[self.session.update]["rates"]
            if len(rates) == len(optimizer.param_groups):
                self.script_settings[id(optimizer)] = _group_settings(optimizer, "lr", *_MOMENTA)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    if group.get("lr") is not None:
                        group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else rate
                _set_momenta(optimizer, recorded_updates[self.session.update]["momenta"])

    def restore_learning_rates(self, optimizer: Any) -> None:
        """Set the learning rates and momenta of the script again, if they were replaced for a step."""
        # the same objects, because a compiled optimizer refers to the tensor of its learning rate
        for group, settings in zip(optimizer.param_groups, self.script_settings.pop(id(optimizer), []), strict=False):
            group.update(settings)

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Record an optimizer after its step. The last update of the run ends the process."""
        session = self.session
        if not session.is_active:
            return
        self.restore_learning_rates(optimizer)
        if not self.current_update:  # the step of its inner optimizer was recorded (ZeroRedundancyOptimizer)
            return
        with session.quiet(), torch.no_grad():
            if self.records_tensors:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                self.current_update["after"] = {self.parameter_names[id(p)]: self.stored_copy(p) for p in parameters}
            self.impose_parameters(optimizer)
            session.updates.append(self.current_update)
            self.current_update = {}
            session.update += 1
            session.num_backwards = 0
            is_last = session.is_last()
        if is_last:
            session.finish()

    def impose_parameters(self, optimizer: Any) -> None:
        """Replace the parameters by the recorded parameters, which may be shards of several ranks."""
        session = self.session
        if not session.parameters or session.update >= len(session.parameters[0]):
            return
        recorded_parameters = [
            updates[session.update]["after"] for updates in session.parameters if session.update < len(updates)
        ]
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            shards = [
                rank_parameters[self.parameter_names[id(parameter)]]
                for rank_parameters in recorded_parameters
                if self.parameter_names[id(parameter)] in rank_parameters
            ]
            local_parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            joined = (
                shards[0]
                if shards and shards[0].shape == local_parameter.shape
                else join_shards(shards, local_parameter.shape)
            )
            if joined is not None:
                local_parameter.copy_(joined)

    def stored_copy(self, tensor: Any) -> Any:
        """Return a copy of a tensor's local shard; if it is large, evenly spaced elements and the norm of the shard.

        For integers, the sum replaces the norm.
        """
        shard, max_elements = shard_of(tensor), self.session.settings["max_elements"]
        if not max_elements or shard.numel() <= max_elements:
            return shard
        flat = shard.flatten()
        norm = flat.double().norm().to(flat.dtype) if flat.is_floating_point() else flat.sum()
        return torch.cat([flat[:: -(-len(flat) // max_elements)], norm[None]])

    def record_states(self) -> None:
        """Record buffers, untrained parameters and running statistics after the previous update.

        It is called when the next optimizer step begins, and before the recording is written.
        """
        updates = self.session.updates
        if updates and len(updates) <= self.session.settings["num_detailed"] and not updates[-1]["states"]:
            states = self.modules.states(self.stepped_parameter_ids)
            with contextlib.suppress(Exception):  # the script's own objects may raise errors
                objects = user_objects()
                self.counters.record(objects)
                for name, tensor, location in running_statistics(objects):
                    states[name] = tensor
                    self.session.facts.setdefault("state_lines", {})[name] = location
            updates[-1]["states"] = {name: self.stored_copy(state) for name, state in states.items()}

    def record_missing_counters(self) -> None:
        """Record counters that a checkpoint lacks."""
        with self.session.quiet(), contextlib.suppress(Exception):
            missing_counters = self.session.facts.setdefault("missing_counters", [])
            missing_now = [[*counter, user_line()] for counter in self.counters.missing_from_state(user_objects())]
            missing_counters += missing_now[: _MAX_MISSING_COUNTERS - len(missing_counters)]


def _reduced(gradient: Any) -> Any:
    """A gradient as the optimizer uses it: a DTensor with partial sums on each rank is summed."""
    placements = getattr(gradient, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if each.is_partial() else each for each in placements])


def shard_of(tensor: Any) -> Any:
    """A copy of a tensor's local shard; empty if its memory has been freed."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return torch.empty(0)
    return tensor.clone(memory_format=torch.contiguous_format).cpu()


def install_step_hooks(session: Session, modules: ModuleNames) -> None:
    """Hook every optimizer, and every backward."""
    steps = _Steps(session, modules)
    session.before_write = steps.record_states
    session.on_save = steps.record_missing_counters
    register_optimizer_step_pre_hook(steps.before_step)
    register_optimizer_step_post_hook(steps.after_step)
    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def init_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.constructed_at[id(self)] = user_line()
        init(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init_and_record
    scheduler_init = torch.optim.lr_scheduler.LRScheduler.__init__

    @functools.wraps(scheduler_init)
    def scheduler_init_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        session.facts.setdefault("schedules", user_lines()[:2])
        scheduler_init(self, *args, **kwargs)

    torch.optim.lr_scheduler.LRScheduler.__init__ = scheduler_init_and_record
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        is_outermost = session.is_active and not session.in_backward
        if not isinstance(tensors, torch.Tensor | list | tuple):
            tensors = tuple(tensors)  # a generator can be read only once
        if is_outermost:
            losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            with session.quiet(), torch.no_grad():
                sums = [loss.detach().double().sum() for loss in losses if isinstance(loss, torch.Tensor)]
                steps.losses.append(sum(map(float, sums)))
            steps.backward_lines.append(user_line())
            session.is_training = True
            session.num_backwards += 1
            session.num_all_backwards += 1
            if session.loader >= 0 and session.loader not in session.facts.setdefault("training_loaders", []):
                session.facts["training_loaders"].append(session.loader)
        was_in_backward, session.in_backward = session.in_backward, True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            session.in_backward = was_in_backward
        if is_outermost and session.settings["backward_is_update"]:
            parameters = [p for _, root in modules.roots() for p in root.parameters() if p.requires_grad]
            fake_optimizer = types.SimpleNamespace(param_groups=[{"params": list(dict.fromkeys(parameters))}])
            steps.before_step(fake_optimizer, (), {})
            steps.after_step(fake_optimizer, (), {})

    torch.autograd.backward = run_backward


_MOMENTA = ("momentum", "betas")  # the momenta, which a schedule such as OneCycleLR changes


def _group_settings(optimizer: Any, *names: str) -> list[dict[str, Any]]:
    """Return the settings of these names of each parameter group that has them."""
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def _as_encoded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that can be recorded, in Python's numbers if they are NumPy's."""
    encoded: dict[str, Any] = {}
    for name, value in settings.items():
        with contextlib.suppress(NotMergedError):
            encoded[name] = encode_batch(value)
    return encoded


def _set_momenta(optimizer: Any, momenta: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, momenta, strict=False):
        group.update({name: value for name, value in values.items() if name in group})
