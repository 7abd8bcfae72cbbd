"""Records each forward of a model with parameters: its line, input rows and random state."""

# The hooks replace parts of torch that are private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from everyrank.audit.events import (
    BufferModule,
    EvalForward,
    Forward,
    ForwardEnd,
    FrozenModule,
    NoSync,
    Opaque,
    Unchecked,
    Uninitialised,
    Wrap,
)
from everyrank.audit.watch.gradients import Gradients, sample
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, checksum, harmless, local, tensors
from everyrank.audit.watch.source_location import is_called_by, user_line

__all__ = ["install_modules"]

_BATCH_NORMS = (torch.nn.modules.batchnorm._BatchNorm,)
_LIGHTNING = ("lightning", "pytorch_lightning")
_MAX_ROWS, _MAX_BATCH = 64, 4096
_MAX_BUFFER_ELEMENTS = 1_000_000  # elements
_MAX_FROZEN_ELEMENTS = 20_000_000  # of a module that is never trained
_MAX_OUTPUTS = 8  # returned tensors of a model
OPAQUE = {  # classes that keep gradients and parameters outside of the script's tensors
    "DeepSpeedEngine": "DeepSpeed, which stores them in its own tensors",
}


class Modules:
    """Records forwards, wrappers, and uninitialised parameters."""

    def __init__(self, recorder: Recorder, losses: Losses, gradients: Gradients) -> None:
        self.recorder, self.losses, self.gradients = recorder, losses, gradients
        self.wrapped = weakref.WeakSet[Any]()  # models that DistributedDataParallel wraps
        self.mode_at = ""  # the line of the last model.eval()
        self.to_empty_line = ""  # the line of the last to_empty, until the next training forward
        # modules without trainable parameters that have been recorded
        self.frozen: list[Any] = []
        self.frozen_after_update: list[Any] = []
        self.reported_kinds = set[str]()  # classes of modules that have been reported, or need not be

    @harmless("forwards of a model")
    def start_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Record the start of a forward of a whole model."""
        recorder, is_grad = self.recorder, torch.is_grad_enabled()
        self.losses.is_evaluating = not is_grad
        root = _unwrapped(module)
        kind = type(module).__name__
        with recorder.muted():
            line, first_tensor = user_line(), _first_with_samples((args, kwargs))
            kinds = (
                {type(inner).__name__ for inner in module.modules()} - self.reported_kinds if is_grad else set[str]()
            )
            if is_grad:
                self.gradients.watch(root)
            num_samples = next((t.shape[0] for t in tensors((args, kwargs)) if t.dim()), 0)
            # a lazy module gets its parameters in its first forward
            shapes = {tuple(parameter.shape) for parameter in root.parameters() if not is_lazy(parameter)}
            forward = Forward(
                line=line,
                wrapper=kind if root is not module or "FSDP" in kind else "",
                bypasses_wrapper=module in self.wrapped,
                broadcasts_buffers=bool(getattr(module, "modules_buffers", None)) and module.broadcast_buffers,
                is_grad=is_grad,
                is_training=root.training,
                row_checksums=rows((args, kwargs)),
                other_inputs=_checksums(t for t in tensors((args, kwargs)) if t is not first_tensor),
                num_samples=num_samples,
                generator=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
                num_batch_norms=sum(isinstance(m, _BATCH_NORMS) for m in root.modules()),
                syncs=bool(getattr(module, "require_backward_grad_sync", True)),
                noise=self.losses.noise.enter_forward((args, kwargs), num_samples, shapes) if is_grad else [],
                is_in_closure=self.gradients.is_in_closure,
            )
            uninitialised = self._uninitialised(root) if is_grad and self.to_empty_line else []
        if is_grad:
            self._report_opaque(kinds)
        if uninitialised:
            recorder.write(Uninitialised(line=self.to_empty_line, names=uninitialised[:6], num=len(uninitialised)))
        self.to_empty_line = "" if is_grad else self.to_empty_line
        recorder.write(forward)

    def _report_opaque(self, kinds: set[str]) -> None:
        """Report each class of module whose gradients cannot be read, once."""
        self.reported_kinds |= kinds
        if self.gradients.reads_deepspeed:
            kinds = kinds - {"DeepSpeedEngine"}
        for kind in sorted(kinds & OPAQUE.keys()):
            self.recorder.write(Opaque(message=f"gradients and replicas under {OPAQUE[kind]}"))
        if "DataParallel" in kinds:
            message = "the replicas of DataParallel; DistributedDataParallel can be checked"
            self.recorder.write(Unchecked(message=message))

    @harmless("the end of a forward")
    def end_forward(self, module: Any, output: Any, num_dropouts: int) -> None:
        """Record the end of a forward. `num_dropouts` masks had been drawn before it."""
        recorder = self.recorder
        if torch.is_grad_enabled():
            if self.gradients.has_lazy:
                self.gradients.watch(_unwrapped(module))
            self.losses.forward_done(output)
            noise = self.losses.noise
            with recorder.muted():
                outputs = [t for t in itertools.islice(tensors(output), _MAX_OUTPUTS) if t.is_floating_point()]
                end = ForwardEnd(
                    num_dropouts=self.losses.num_dropouts - num_dropouts,
                    noise=noise.forward_draws,
                    drawn_at=sorted(noise.forward_lines),
                    output=zlib.crc32(b"".join(sample(tensor).tobytes() for tensor in outputs)),
                )
            recorder.write(end)
            return
        with recorder.muted():
            is_sharded = any(
                hasattr(parameter, "to_local") or self.gradients.flat.has_parameter(parameter)
                for parameter in module.parameters()
            )
            forward = EvalForward(
                line=user_line(),
                is_training=_unwrapped(module).training,
                num_dropouts=self.losses.num_dropouts - num_dropouts,
                is_prediction=any(is_called_by("_predict_step", package) for package in _LIGHTNING),
                is_lightning=any(is_called_by("_run_stage", package) for package in _LIGHTNING),
                buffers=_checksums(module.buffers()),
                parameters=0 if is_sharded else _checksums(module.parameters()),
                mode_at=self.mode_at,
            )
        recorder.write(forward)

    @harmless("losses that a model returns")
    def end_inner_module(self, output: Any) -> None:
        """Track the losses that a module inside a model returns."""
        self.losses.module_done(output)

    @harmless("weights of modules that are never trained")
    def record_frozen(self, module: Any) -> None:
        """Record the tensors of a module without trainable parameters, such as a teacher, before its first call."""
        recorder = self.recorder
        recorded = self.frozen_after_update if recorder.update else self.frozen
        is_in_training = bool(recorder.update) and torch.is_grad_enabled()
        if recorder.is_muted or is_in_training or any(module is known for known in recorded):
            return
        recorded.append(module)
        with recorder.muted():
            # later, each rank may have other running statistics
            named = {**dict(module.named_parameters()), **({} if recorder.update else dict(module.named_buffers()))}
            floats = {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
            is_sharded = any(
                hasattr(each, "to_local") or self.gradients.flat.has_parameter(each) for each in floats.values()
            )
            if is_sharded or not 0 < sum(tensor.numel() for tensor in floats.values()) <= _MAX_FROZEN_ELEMENTS:
                return
            checksums = {name: checksum(tensor) for name, tensor in floats.items()}
        recorder.write(FrozenModule(line=user_line(), name=type(module).__name__, tensors=checksums))

    @harmless("buffers of modules outside of the wrapped model")
    def record_buffers(self, module: Any) -> None:
        """Record buffers of a module without trainable parameters, such as a loss. DDP does not synchronise them."""
        recorder = self.recorder
        if not torch.is_grad_enabled() or recorder.is_muted or recorder.update >= recorder.settings.updates:
            return
        with recorder.muted():
            norm_prefixes = {
                f"{name}." if name else "" for name, inner in module.named_modules() if isinstance(inner, _BATCH_NORMS)
            }
            buffers = {
                name: checksum(buffer)
                for name, buffer in module.named_buffers()
                if buffer.is_floating_point()
                and buffer.numel() <= _MAX_BUFFER_ELEMENTS
                and name.removesuffix(name.rpartition(".")[2]) not in norm_prefixes
            }
        if buffers:
            recorder.write(BufferModule(line=user_line(), name=type(module).__name__, buffers=buffers))

    @harmless("the model given to DistributedDataParallel")
    def record_wrap(self, module: Any, kwargs: Any) -> None:
        """Record a model that is given to DistributedDataParallel."""
        # only these classes, because subclasses may use the samples of all ranks
        local_norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        with self.recorder.muted():
            wrap = Wrap(
                line=user_line(),
                num_batch_norms=sum(type(inner) in local_norms for inner in module.modules()),
                finds_unused=bool(kwargs.get("find_unused_parameters")),
                bucket_mb=kwargs.get("bucket_cap_mb"),
                numel=sum(parameter.numel() for parameter in module.parameters()),
            )
        self.recorder.write(wrap)

    @harmless("parameters without a value after to_empty")
    def fill_with_nan(self, module: Any, recurse: bool) -> None:
        """Fill the tensors that to_empty has created with NaN, to find parameters that never get a value."""
        with torch.no_grad(), self.recorder.muted():
            for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
                if local(tensor).is_floating_point():
                    local(tensor).fill_(float("nan"))
        self.to_empty_line = user_line()

    def _uninitialised(self, root: Any) -> list[str]:
        """The names of parameters that are still NaN. Sets them to small values, so that training can continue."""
        names = list[str]()
        for name, parameter in root.named_parameters():
            if is_lazy(parameter):
                continue
            values = local(parameter)
            if bool(values.isnan().any()):
                values.copy_(torch.linspace(-0.02, 0.02, values.numel(), device=values.device).view(values.shape))
                names.append(name)
        return names


def _unwrapped(module: Any) -> Any:
    """The module inside DistributedDataParallel, because Lightning sets the train mode only there."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _checksums(values: Any) -> int:
    return zlib.crc32(repr([checksum(value) for value in values]).encode())


def rows(arguments: Any) -> list[str]:
    """A checksum for each sample of the first tensor of shape (N, ...) with several elements for each sample."""
    tensor = _first_with_samples(arguments)
    if tensor is None:
        return []
    samples = local(tensor).cpu().contiguous()
    first_rows = samples[:_MAX_ROWS].reshape(min(_MAX_ROWS, len(samples)), -1).view(torch.uint8).numpy()
    return [f"{zlib.crc32(row):08x}" for row in first_rows]


def _first_with_samples(arguments: Any) -> Any:
    for tensor in tensors(arguments):
        if tensor.dim() >= 1 and tensor.shape[0] <= _MAX_BATCH and tensor.numel() > 2 * tensor.shape[0]:
            return tensor
    return None


def install_modules(recorder: Recorder, losses: Losses, gradients: Gradients) -> None:
    """Hook each call of a module that has trainable parameters and is not inside another module."""
    modules = Modules(recorder, losses, gradients)
    _watch_calls(modules)
    _watch_wrapping(modules)
    _watch_join(recorder)
    _watch_to_empty(modules)
    _watch_eval(modules)


def _watch_eval(modules: Modules) -> None:
    """Record the line of each `model.eval()`."""
    to_eval = torch.nn.Module.eval

    @functools.wraps(to_eval)
    def evaluating(self: Any) -> Any:
        if not modules.recorder.is_muted:
            modules.mode_at = user_line()
        return to_eval(self)

    torch.nn.Module.eval = evaluating


def _watch_calls(modules: Modules) -> None:
    module_call = torch.nn.Module.__call__
    recorder, losses = modules.recorder, modules.losses

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_inside_model = losses.depth or recorder.is_muted
        if losses.depth and losses.inner_terms:
            output = module_call(self, *args, **kwargs)
            modules.end_inner_module(output)
            return output
        if is_inside_model or not any(parameter.requires_grad for parameter in self.parameters()):
            if not is_inside_model:
                modules.record_frozen(self)
            output = module_call(self, *args, **kwargs)
            if not is_inside_model:
                modules.record_buffers(self)
            return output
        modules.start_forward(self, args, kwargs)
        num_dropouts = losses.num_dropouts
        losses.depth += 1
        try:
            with recorder.during(f"forward at {user_line()}"):
                output = module_call(self, *args, **kwargs)
        finally:
            losses.depth -= 1
        modules.end_forward(self, output, num_dropouts)
        return output

    torch.nn.Module.__call__ = call


def _watch_wrapping(modules: Modules) -> None:
    recorder, init = modules.recorder, DistributedDataParallel.__init__

    @functools.wraps(init)
    def wrap(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any):
        modules.record_wrap(module, kwargs)
        with recorder.during(f"DistributedDataParallel() at {user_line()}"):
            init(self, module, device_ids, output_device, *args, **kwargs)
        modules.wrapped.add(module)

    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def registered(self: Any, *args: Any, **kwargs: Any) -> Any:
        message = "gradients and replicas: a communication hook of DistributedDataParallel changes the gradients"
        recorder.write(Opaque(message=message))
        return register(self, *args, **kwargs)

    no_sync = DistributedDataParallel.no_sync

    @functools.wraps(no_sync)
    def unsynced(self: Any) -> Any:
        if recorder.update < recorder.settings.updates:
            recorder.write(NoSync(line=user_line()))
        return no_sync(self)

    DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook = wrap, registered
    DistributedDataParallel.no_sync = unsynced


def _watch_join(recorder: Recorder) -> None:
    enter = Join.__enter__

    @functools.wraps(enter)
    def joined(self: Any) -> Any:
        message = "gradients and replicas under torch's Join: a rank with less data makes fewer updates than others"
        recorder.write(Opaque(message=message))
        return enter(self)

    Join.__enter__ = joined


def _watch_to_empty(modules: Modules) -> None:
    """Hook `to_empty`, which creates uninitialised parameters."""
    to_empty = torch.nn.Module.to_empty

    @functools.wraps(to_empty)
    def empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        out = to_empty(self, device=device, recurse=recurse)
        modules.fill_with_nan(self, recurse)
        return out

    torch.nn.Module.to_empty = empty
