"""Records the gradient of each backward and of each optimizer step, as small samples of each tensor.

The gradient of the step should be a linear combination of those of the backwards, so a sample of 2,048 elements of each
tensor is enough to find the factors. A hook on each parameter gets the gradient of one backward on one rank, before it
is accumulated or sent.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import unserializable_hook

from everyrank.audit.events import OptimizerStep
from everyrank.audit.watch.flat_shards import FlatShards, name_in_model
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, checksum, harmless, local
from everyrank.audit.watch.source_location import user_line

__all__ = ["Gradients", "sample"]

_SAMPLE_SIZE = 2048


class Gradients:
    """The gradients of the current update."""

    def __init__(self, recorder: Recorder, losses: Losses) -> None:
        self.recorder, self.losses = recorder, losses
        self.names: dict[int, str] = {}  # of living parameters, by id
        self.used_names: set[str] = set()  # also of parameters that are gone, so that all ranks give the same names
        self.references: dict[int, Any] = {}  # by id, because a new parameter may get the id of a deleted one
        self.flat = FlatShards()
        self.reads_deepspeed, self.is_in_engine = False, False
        self.engine_grads: dict[str, np.ndarray] = {}  # gradients of the step under DeepSpeed, by name
        self.hooked: set[int] = set()
        self.sharded: dict[int, tuple[Any, Any]] = {}  # id of a gathered parameter -> the parameter, its shard
        self.parameters: list[Any] = []  # of the model of the last forward
        self.is_fully_sharded = False
        self.has_lazy = False  # the model of the last forward had parameters that only a forward creates
        self.ignored: set[int] = set()  # ids of parameters that FSDP1 does not shard
        self.backward_grads: dict[tuple[int, str], np.ndarray] = {}  # by backward and name
        self.last_backward_grads: dict[
            tuple[int, str], np.ndarray
        ] = {}  # pieces of the last step that had any: one optimizer of two may have none
        self.backward_update = 0  # the update whose backwards those are
        self.carried_grads: dict[str, np.ndarray] = {}  # .grad before the first backward of the update
        self.unclipped_grads: dict[str, np.ndarray] | None = None
        self.loss_scale, self.is_unscaled = 1.0, False
        self.zeroed_at = ""  # the line of the last zero_grad
        self.is_in_closure = False  # inside an optimizer's step, which computes the loss by a closure

    @property
    def is_wanted(self) -> bool:
        """Whether the gradients of this update are recorded."""
        return not self.recorder.is_muted and self.recorder.update < self.recorder.settings.updates

    @harmless("gradients of some parameters")
    def watch(self, root: Any) -> None:
        """Hook the parameters of a model that are not hooked yet, and record their names."""
        self.parameters = [self._sharded(parameter) for parameter in root.parameters()]
        self.is_fully_sharded = any("FSDP" in type(module).__name__ for module in root.modules())
        self.ignored |= {id(p) for module in root.modules() for p in getattr(module, "_ignored_params", ())}
        for flat in self.flat.add_model(root):
            flat.register_hook(self._flat_hook(flat))
        self.has_lazy = False
        for name, named_parameter in root.named_parameters():
            parameter = self._sharded(named_parameter)
            if is_lazy(parameter):
                self.has_lazy = True
                continue
            if id(parameter) not in self.names:
                name = name_in_model(name)
                # two models, such as a generator and a discriminator, may use the same name
                is_taken = name in self.used_names
                self._add_name(
                    parameter, f"{type(root).__name__}.{name} ({len(self.used_names)})" if is_taken else name
                )
            is_whole = not hasattr(parameter, "to_local") and not self.flat.has_parameter(parameter)
            if id(parameter) not in self.hooked and parameter.requires_grad and is_whole:
                self.hooked.add(id(parameter))
                parameter.register_hook(self.leaf_hook(self.names[id(parameter)]))

    def _add_name(self, parameter: Any, name: str) -> None:
        self.names[id(parameter)] = name
        self.used_names.add(name)
        # torch cannot swap a DTensor that has weak references, as model.to() does
        is_held = hasattr(parameter, "to_local") or torch.__future__.get_swap_module_params_on_conversion()
        forget = functools.partial(self._forget, id(parameter))
        self.references[id(parameter)] = parameter if is_held else weakref.ref(parameter, forget)

    def _forget(self, parameter_id: int, _: Any) -> None:
        self.names.pop(parameter_id, None)
        self.references.pop(parameter_id, None)
        self.hooked.discard(parameter_id)

    def gathered(self, gathered_parameter: Any, shard: Any) -> None:
        """Remember the shard of a parameter that fully_shard has gathered, perhaps until a later forward."""
        self.sharded[id(gathered_parameter)] = gathered_parameter, shard

    def _sharded(self, parameter: Any) -> Any:
        """The shard of a gathered parameter, which the optimizer updates; any other parameter unchanged."""
        gathered_parameter, shard = self.sharded.get(id(parameter), (None, parameter))
        return shard if gathered_parameter is parameter else parameter

    def leaf_hook(self, name: str) -> Callable[[Any], None]:
        """A hook that records the gradient of the parameter with this name in each backward."""

        @unserializable_hook  # otherwise torch warns if the script sends the parameter to another process
        def add_gradient(grad: Any) -> None:
            self._add_gradient(name, grad)

        return add_gradient

    def _flat_hook(self, flat: Any) -> Callable[[Any], None]:
        def add_gradient(grad: Any) -> None:
            for name, gradient in self.flat.split_gradient(flat, grad):
                self._add_gradient(name, gradient)

        return add_gradient

    @harmless("gradients of a backward")
    def _add_gradient(self, name: str, grad: Any) -> None:
        if self.is_wanted and not hasattr(grad, "to_local"):
            with self.recorder.muted():
                key = (self.recorder.micro, name)
                values = sample(grad)
                self.backward_grads[key] = self.backward_grads[key] + values if key in self.backward_grads else values

    @harmless("the values of .grad", dict)
    def step_samples(self, parameters: Iterable[Any]) -> dict[str, np.ndarray]:
        """Samples of .grad by name. Elements of sharded tensors that are on other ranks are NaN."""
        samples: dict[str, np.ndarray] = {}
        for parameter in parameters:
            grad = parameter.grad
            if self.flat.has_parameter(parameter):
                samples |= self.flat.shard_samples(parameter, shard_sample)
            elif grad is not None and id(parameter) in self.names:
                samples[self.names[id(parameter)]] = whole_sample(grad) if hasattr(grad, "to_local") else sample(grad)
        return samples

    def squares(self) -> dict[str, float]:
        """The sum of squares of the local shard of each gradient, by name; {} before a backward."""
        if not self.recorder.micro:
            return {}
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        return {
            self.names[id(p)]: float(local(p.grad).abs().double().square().sum())
            for p in trained
            if id(p) in self.names
        }

    @harmless("gradients that were carried over from the update before")
    def begin_backward(self) -> None:
        """Record gradients that are carried over from the previous update."""
        if not self.backward_grads and self.is_wanted:
            whole_parameters = [
                p for p in self.parameters if not hasattr(p, "to_local") and not self.flat.has_parameter(p)
            ]
            with self.recorder.muted():
                self.carried_grads = self.step_samples(whole_parameters) | self.flat.carried_samples(shard_sample)

    def step(self, optimizer: Any) -> None:
        """Record an optimizer step, then start the next update."""
        self._write_step(optimizer)
        self.losses.waits.clear()
        self.start_update()
        self.recorder.update += 1

    @harmless("an optimizer step")
    def _write_step(self, optimizer: Any) -> None:
        recorder = self.recorder
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.backward_grads:
            self.last_backward_grads, self.backward_update = self.backward_grads, recorder.update
        with recorder.muted():
            for parameter in parameters:
                if id(parameter) not in self.names:
                    self._add_name(parameter, f"optimizer[{len(self.used_names)}]")
            if recorder.update < recorder.settings.updates:
                self._write_samples(parameters)
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            step = self._step_event(parameters, rates)
        recorder.write(step)

    def start_update(self) -> None:
        """Reset the gradients at the start of an update."""
        self.backward_grads, self.carried_grads, self.unclipped_grads, self.is_unscaled = {}, {}, None, False
        self.recorder.micro = 0

    def _write_samples(self, parameters: list[Any]) -> None:
        arrays = {f"backward {micro} {name}": value for (micro, name), value in self.last_backward_grads.items()}
        step_samples = self.engine_grads if self.is_in_engine else self.step_samples(parameters)
        arrays |= {f"step {name}": value for name, value in step_samples.items()}
        arrays |= {f"clip {name}": value for name, value in (self.unclipped_grads or {}).items()}
        arrays |= {f"carried {name}": value for name, value in self.carried_grads.items()}
        self.recorder.arrays(f"rank{self.recorder.rank}.update{self.recorder.update}", arrays)

    def _step_event(self, parameters: list[Any], rates: list[float]) -> OptimizerStep:
        is_sharded = self.is_in_engine or any(
            hasattr(parameter, "to_local") or self.flat.has_parameter(parameter) for parameter in parameters
        )
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return OptimizerStep(
            line=user_line(),
            rates=rates,
            waits=[(function, line, count) for (function, line), count in self.losses.waits.items()],
            backward_update=self.backward_update,
            checksums={} if is_sharded else {self.names[id(p)]: checksum(p) for p in parameters},
            replicated=self._replicated(parameters) if (is_sharded or self.ignored) and not self.is_in_engine else {},
            is_sharded=is_sharded,
            is_split=any(_is_split(parameter, self.is_fully_sharded) for parameter in parameters),
            shapes=zlib.crc32(repr([tuple(local(parameter).shape) for parameter in parameters]).encode()),
            without_gradient=[self.names[id(p)] for p in trained if p.grad is None and local(p).numel()][:20],
            not_stepped=[] if self.is_in_engine else self._not_stepped(parameters),
            is_zero=bool(grads) and all(float(grad.abs().sum()) == 0 for grad in grads),
            loss_scale=self.loss_scale,
            zeroed_at=self.zeroed_at,
        )

    def _replicated(self, parameters: list[Any]) -> dict[str, int]:
        """Checksums of the parameters that are replicated while others are sharded, by name."""
        if self.ignored:
            parameters = [parameter for parameter in parameters if id(parameter) in self.ignored]
        whole_parameters = [
            p
            for p in parameters
            if not self.flat.has_parameter(p)
            and (not hasattr(p, "placements") or all(each.is_replicate() for each in p.placements))
        ]
        return {self.names[id(parameter)]: checksum(parameter) for parameter in whole_parameters}

    def _not_stepped(self, parameters: list[Any]) -> list[str]:
        """The names of parameters that have a gradient and are not in this optimizer."""
        stepped = {id(parameter) for parameter in parameters}
        not_stepped = [p for p in self.parameters if p.requires_grad and p.grad is not None and id(p) not in stepped]
        return [self.names[id(parameter)] for parameter in not_stepped if id(parameter) in self.names][:20]


def sample(tensor: Any) -> np.ndarray:
    """At most 2,048 elements of a tensor in float64, at equal distances that depend only on its size.

    A complex number counts as two elements.
    """
    values = local(tensor)
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    if flat.numel() > _SAMPLE_SIZE:
        flat = flat[:: -(-flat.numel() // _SAMPLE_SIZE)]
    return flat.to(torch.float64, copy=True).cpu().numpy()


def whole_sample(grad: Any) -> np.ndarray:
    """The sample of a whole tensor that is sharded along dimension 0. Elements on other ranks are NaN."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    count = grad.numel()
    _, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    start = offset[0] * (count // grad.shape[0]) if grad.dim() else 0
    return shard_sample(local(grad).reshape(-1), start, count)


def shard_sample(shard: Any, start: int, count: int) -> np.ndarray:
    """The sample of a tensor of `count` elements, if this rank has `shard` from `start` on. Other elements are NaN."""
    shard = shard.double().cpu()
    positions = torch.arange(0, count, -(-count // _SAMPLE_SIZE) if count > _SAMPLE_SIZE else 1)
    out = torch.full((positions.numel(),), float("nan"), dtype=torch.float64)
    is_local = (positions >= start) & (positions < start + shard.numel())
    out[is_local] = shard[positions[is_local] - start]
    return out.numpy()


def _is_split(parameter: Any, is_fully_sharded: bool) -> bool:
    """Whether a DTensor is sharded in a way that fully_shard does not use: not by a single Shard(0)."""
    if not hasattr(parameter, "placements"):
        return False
    kinds = [placement for placement in parameter.placements if not placement.is_replicate()]
    return len(kinds) != 1 or not kinds[0].is_shard() or kinds[0].dim != 0 or not is_fully_sharded
