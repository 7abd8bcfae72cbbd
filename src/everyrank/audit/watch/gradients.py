"""Records the gradient of each backward, and the gradient that steps, as small samples of each tensor.

The gradient that steps should be a linear combination of those of the backwards, so a sample of 2,048 elements of each
tensor is enough to find the factors. A hook on a parameter gets the gradient of one backward on one rank, before it is
accumulated or sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from everyrank.audit.events import OptimizerStep
from everyrank.audit.watch.flat_shards import FlatShards, name_in_model
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.place import where
from everyrank.audit.watch.recorder import Recorder, checksum, harmless, local

__all__ = ["Gradients", "sample"]

_SAMPLE = 2048


class Gradients:
    """The gradients of the current update."""

    def __init__(self, recorder: Recorder, losses: Losses) -> None:
        self.recorder, self.losses = recorder, losses
        self.names: dict[int, str] = {}
        self.flat = FlatShards()
        self.reads_deepspeed, self.is_in_engine = False, False
        self.of_engine: dict[str, np.ndarray] = {}  # the gradients that step under DeepSpeed, by name
        self.hooked: set[int] = set()
        self.sharded: dict[int, tuple[Any, Any]] = {}  # by id of a gathered parameter: it, and its shard
        self.parameters: list[Any] = []  # of the model whose forward came last
        self.is_fully_sharded = False
        self.ignored: set[int] = set()  # ids of parameters that FSDP1 leaves whole
        self.pieces: dict[tuple[int, str], np.ndarray] = {}  # by backward and name
        self.stepped: dict[
            tuple[int, str], np.ndarray
        ] = {}  # pieces of the last step that had any: one optimizer of two may have none
        self.backward_update = 0  # the update whose backwards those are
        self.before_first: dict[str, np.ndarray] = {}  # .grad before the first backward of the update
        self.before_clip: dict[str, np.ndarray] | None = None
        self.loss_scale, self.is_unscaled = 1.0, False
        self.zeroed_at = ""  # the line of the last zero_grad
        self.is_in_closure = False  # inside an optimizer's step, which computes the loss by a closure

    @property
    def is_wanted(self) -> bool:
        """Whether the gradients of this update are recorded."""
        return not self.recorder.is_muted and self.recorder.update < self.recorder.settings.updates

    @harmless("gradients of some parameters")
    def watch(self, root: Any) -> None:
        """Hook the parameters that are not hooked yet, under their names in the model."""
        self.parameters = [self._sharded(parameter) for parameter in root.parameters()]
        self.is_fully_sharded = any("FSDP" in type(module).__name__ for module in root.modules())
        self.ignored |= {id(p) for module in root.modules() for p in getattr(module, "_ignored_params", ())}
        for flat in self.flat.find(root):
            flat.register_hook(self._flat_hook(flat))
        for name, shown in root.named_parameters():
            parameter = self._sharded(shown)
            if id(parameter) not in self.names:
                name = name_in_model(name)
                # two models, such as a generator and a discriminator, may use the same name
                is_taken = name in self.names.values()
                self.names[id(parameter)] = f"{type(root).__name__}.{name} ({len(self.names)})" if is_taken else name
            is_whole = not hasattr(parameter, "to_local") and not self.flat.holds(parameter)
            if id(parameter) not in self.hooked and parameter.requires_grad and is_whole:
                self.hooked.add(id(parameter))
                parameter.register_hook(self.leaf_hook(self.names[id(parameter)]))

    def gathered(self, whole: Any, shard: Any) -> None:
        """Remember a parameter that fully_shard has gathered. It may stay gathered until a later forward."""
        self.sharded[id(whole)] = whole, shard

    def _sharded(self, parameter: Any) -> Any:
        """The shard of a gathered parameter, which the optimizer steps; any other parameter itself."""
        whole, shard = self.sharded.get(id(parameter), (None, parameter))
        return shard if whole is parameter else parameter

    def leaf_hook(self, name: str) -> Callable[[Any], None]:
        """A hook that adds the gradient of a backward for the parameter of this name."""

        def seen(grad: Any) -> None:
            self._add_piece(name, grad)

        return seen

    def _flat_hook(self, flat: Any) -> Callable[[Any], None]:
        def seen(grad: Any) -> None:
            for name, part in self.flat.parts(flat, grad):
                self._add_piece(name, part)

        return seen

    @harmless("gradients of a backward")
    def _add_piece(self, name: str, grad: Any) -> None:
        if self.is_wanted and not hasattr(grad, "to_local"):
            with self.recorder.muted():
                key = (self.recorder.micro, name)
                values = sample(grad)
                self.pieces[key] = self.pieces[key] + values if key in self.pieces else values

    @harmless("the values of .grad", dict)
    def stepping(self, parameters: Iterable[Any]) -> dict[str, np.ndarray]:
        """Samples of .grad by name. Of a sharded tensor, elements of other ranks are NaN."""
        samples: dict[str, np.ndarray] = {}
        for parameter in parameters:
            grad = parameter.grad
            if self.flat.holds(parameter):
                samples |= self.flat.shards(parameter, shard_sample)
            elif grad is not None and id(parameter) in self.names:
                samples[self.names[id(parameter)]] = whole_sample(grad) if hasattr(grad, "to_local") else sample(grad)
        return samples

    def squares(self) -> dict[str, float]:
        """The sum of squares of the local part of each gradient, by name; {} before a backward."""
        if not self.recorder.micro:
            return {}
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        return {self.names[id(p)]: float(local(p.grad).double().square().sum()) for p in trained if id(p) in self.names}

    @harmless("gradients that were carried over from the update before")
    def begin_backward(self) -> None:
        """Record gradients that are carried over from the previous update."""
        if not self.pieces and self.is_wanted:
            whole = [p for p in self.parameters if not hasattr(p, "to_local") and not self.flat.holds(p)]
            with self.recorder.muted():
                self.before_first = self.stepping(whole) | self.flat.carried(shard_sample)

    def step(self, optimizer: Any) -> None:
        """Record an optimizer step, then begin the next update."""
        self._write_step(optimizer)
        self.losses.waits.clear()
        self.forget()
        self.recorder.update += 1

    @harmless("an optimizer step")
    def _write_step(self, optimizer: Any) -> None:
        recorder = self.recorder
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.pieces:
            self.stepped, self.backward_update = self.pieces, recorder.update
        with recorder.muted():
            for parameter in parameters:
                self.names.setdefault(id(parameter), f"optimizer[{len(self.names)}]")
            if recorder.update < recorder.settings.updates:
                self._write_samples(parameters)
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            step = self._step_event(parameters, rates)
        recorder.write(step)

    def forget(self) -> None:
        """Begin an update."""
        self.pieces, self.before_first, self.before_clip, self.is_unscaled = {}, {}, None, False
        self.recorder.micro = 0

    def _write_samples(self, parameters: list[Any]) -> None:
        content = {f"piece {micro} {name}": value for (micro, name), value in self.stepped.items()}
        stepping = self.of_engine if self.is_in_engine else self.stepping(parameters)
        content |= {f"step {name}": value for name, value in stepping.items()}
        content |= {f"clip {name}": value for name, value in (self.before_clip or {}).items()}
        content |= {f"carried {name}": value for name, value in self.before_first.items()}
        self.recorder.arrays(f"rank{self.recorder.rank}.update{self.recorder.update}", content)

    def _step_event(self, parameters: list[Any], rates: list[float]) -> OptimizerStep:
        is_sharded = self.is_in_engine or any(
            hasattr(parameter, "to_local") or self.flat.holds(parameter) for parameter in parameters
        )
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return OptimizerStep(
            line=where(),
            rates=rates,
            waits=[(function, line, count) for (function, line), count in self.losses.waits.items()],
            backward_update=self.backward_update,
            checksums={} if is_sharded else {self.names[id(p)]: checksum(p) for p in parameters},
            replicated=self._replicated(parameters) if (is_sharded or self.ignored) and not self.is_in_engine else {},
            is_sharded=is_sharded,
            is_split=any(_is_split(parameter, self.is_fully_sharded) for parameter in parameters),
            shapes=zlib.crc32(repr([tuple(local(parameter).shape) for parameter in parameters]).encode()),
            without_gradient=[self.names[id(p)] for p in trained if p.grad is None and local(p).numel()][:20],
            not_stepped=[] if self.is_in_engine else self._left_out(parameters),
            is_zero=bool(grads) and all(float(grad.abs().sum()) == 0 for grad in grads),
            loss_scale=self.loss_scale,
            zeroed_at=self.zeroed_at,
        )

    def _replicated(self, parameters: list[Any]) -> dict[str, int]:
        """Checksums by name of the parameters that each rank holds whole, where others are sharded."""
        if self.ignored:
            parameters = [parameter for parameter in parameters if id(parameter) in self.ignored]
        whole = [
            p
            for p in parameters
            if not self.flat.holds(p)
            and (not hasattr(p, "placements") or all(each.is_replicate() for each in p.placements))
        ]
        return {self.names[id(parameter)]: checksum(parameter) for parameter in whole}

    def _left_out(self, parameters: list[Any]) -> list[str]:
        """The names of parameters that have a gradient and do not belong to this optimizer."""
        stepped = {id(parameter) for parameter in parameters}
        left = [p for p in self.parameters if p.requires_grad and p.grad is not None and id(p) not in stepped]
        return [self.names[id(parameter)] for parameter in left if id(parameter) in self.names][:20]


def sample(tensor: Any) -> np.ndarray:
    """At most 2,048 elements at equal distances, as float64; the same positions for all tensors of a size."""
    flat = local(tensor).reshape(-1)
    if flat.numel() > _SAMPLE:
        flat = flat[:: -(-flat.numel() // _SAMPLE)]
    return flat.to(torch.float64, copy=True).cpu().numpy()


def whole_sample(grad: Any) -> np.ndarray:
    """The sample of a whole tensor, of which this rank has a shard of dimension 0. Other elements are NaN."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    count = grad.numel()
    _, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    start = offset[0] * (count // grad.shape[0]) if grad.dim() else 0
    return shard_sample(local(grad).reshape(-1), start, count)


def shard_sample(shard: Any, start: int, count: int) -> np.ndarray:
    """The sample of a tensor of `count` elements, of which this rank has those from `start` on. Others are NaN."""
    shard = shard.double().cpu()
    positions = torch.arange(0, count, -(-count // _SAMPLE) if count > _SAMPLE else 1)
    out = torch.full((positions.numel(),), float("nan"), dtype=torch.float64)
    is_local = (positions >= start) & (positions < start + shard.numel())
    out[is_local] = shard[positions[is_local] - start]
    return out.numpy()


def _is_split(parameter: Any, is_fully_sharded: bool) -> bool:
    """Whether a DTensor is sharded in a way that fully_shard does not use: anything but one dimension of Shard(0)."""
    if not hasattr(parameter, "placements"):
        return False
    kinds = [placement for placement in parameter.placements if not placement.is_replicate()]
    return len(kinds) != 1 or not kinds[0].is_shard() or kinds[0].dim != 0 or not is_fully_sharded
