"""Records the first updates for `audit --replay`: inputs, random state, and the functions from output to loss.

Each rank writes a file for each backward. Rank 0 also copies the parameters and buffers. The script's code cannot be
called again, so the torch functions that it calls on the model's output are recorded with their arguments. If something
cannot be recorded, the report names it, and this update and later ones are not replayed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from everyrank.audit.events import Unchecked
from everyrank.audit.replay.state import (
    ModelState,
    RecordedBackward,
    RecordedCall,
    ReplayError,
    TensorReference,
    backward_path,
    picklable,
)
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, harmless, tensors

__all__ = ["ReplayRecorder", "generator_states", "install_replay_recording"]

_MAX_PARAMETERS = 20_000_000
_MAX_BYTES = 64 * 2**20  # of the inputs and targets of a rank's update
_MAX_CALLS = 500  # functions from the output to the loss
_PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, slice, type(...))


class ReplayRecorder:
    """Records the first updates for the replay."""

    def __init__(self, recorder: Recorder, losses: Losses, gradients: Gradients) -> None:
        self.recorder, self.losses, self.gradients = recorder, losses, gradients
        self.model: Any = None  # the model without its wrapper
        self.world_size = 1
        self.states: dict[int, ModelState] = {}
        self.is_over = False
        self.current: RecordedBackward | None = None
        self.known: dict[int, Any] = {}  # tensors that the replay computes, by id; held, so that no id is reused
        self.num_bytes: dict[int, int] = {}  # by update

    @property
    def rank(self) -> int:
        """The rank of this process, which is 0 without a process group."""
        return max(self.recorder.rank, 0)

    @property
    def is_wanted(self) -> bool:
        """Whether calls are recorded now: this update will be replayed, and no hook or backward is running."""
        recorder = self.recorder
        # activation checkpointing calls forward inside a backward
        is_ignored = self.is_over or recorder.is_muted or recorder.phase.startswith("backward")
        return not is_ignored and recorder.update < recorder.settings.replay

    def disable(self, reason: Any) -> None:
        """Stop recording, and report why. Updates that are already recorded will be replayed."""
        self.is_over, self.current, self.known = True, None, {}
        self.states.pop(self.recorder.update, None)
        self.recorder.write(Unchecked(message=f"replay: {reason}"))

    @harmless("replay: the inputs of a forward")
    def start_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Record the inputs of a forward. On rank 0, also record the model at the first forward of an update."""
        model = module.module if isinstance(module, DistributedDataParallel) else module
        try:
            with self.recorder.muted():
                self._check_replayable(model)
                self.model = model
                self.world_size = dist.get_world_size() if dist.is_initialized() else 1
                self.current = RecordedBackward(tree_map(self._input, (args, kwargs)), generator_states(model))
                if self.rank == 0 and self.recorder.update not in self.states:
                    self.states[self.recorder.update] = _state_of(model)
        except ReplayError as error:
            self.disable(error)

    def end_forward(self, output: Any) -> None:
        """Start to record the functions that are called on this output."""
        if self.current is not None:
            self.known = {id(tensor): tensor for tensor in tensors(output)}
            self.current.outputs = [id(tensor) for tensor in tensors(output)]

    @harmless("replay: the functions from the model's output to the loss")
    def record_call(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a torch function that was called on a known tensor. Its results become known, too."""
        inputs = list(tensors((args, kwargs)))
        if function is torch.Tensor.__setitem__ and id(args[0]) in self.known:
            self.disable("the model's output, or a tensor computed from it, is changed in place")
            return
        results = list(tensors(out))
        if self.current is None or not results or not any(id(tensor) in self.known for tensor in inputs):
            return
        if any(id(result) not in self.known and any(result is tensor for tensor in inputs) for result in results):
            if any(result.requires_grad for result in results):
                self.disable(f"the loss is added up in place ({function.__name__}) in a tensor of the script's own")
            return  # a running sum for the script's log
        try:
            with self.recorder.muted():
                args, kwargs = tree_map(self._argument, (tuple(args), dict(kwargs)))
        except ReplayError as error:
            self.disable(error)
            return
        result_ids = [id(tensor) for tensor in results]
        self.current.calls.append(RecordedCall(picklable(function), args, kwargs, result_ids, torch.is_grad_enabled()))
        self.known |= {id(tensor): tensor for tensor in results}
        if len(self.current.calls) > _MAX_CALLS:
            self.disable(f"more than {_MAX_CALLS} functions between the model's output and the loss")

    @harmless("replay: a backward")
    def end_backward(self, losses: Any, has_gradient: bool) -> RecordedBackward | None:
        """Return the record of this backward, with only the calls that its loss depends on; None if not replayable."""
        current, known = self.current, self.known
        self.current, self.known = None, {}
        losses = [losses] if isinstance(losses, torch.Tensor) else list(losses)
        if current is None:
            self.disable("a backward without a new forward")
        elif len(losses) != 1 or losses[0].numel() != 1 or has_gradient:
            self.disable("a backward of a tensor that is not a single number")
        elif id(losses[0]) not in known:
            self.disable("the loss is computed from the model's output by functions that cannot be recorded")
        else:
            current.loss_id = id(losses[0])
            current.calls = _needed_calls(current)
            return current
        return None

    def write(self, backward: RecordedBackward, update: int, micro: int) -> None:
        """Write a backward to its file, atomically."""
        path = backward_path(self.recorder.folder, self.rank, update, micro)
        try:
            with self.recorder.muted():
                torch.save(backward, path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)  # noqa: PTH105
        except Exception as error:
            self.disable(f"the functions before the loss cannot be pickled ({type(error).__name__}: {error})"[:200])

    def _check_replayable(self, model: Any) -> None:
        parameters = list(model.parameters())
        class_names = {type(module).__name__ for module in model.modules()}
        device = parameters[0].device.type
        number = sum(parameter.numel() for parameter in parameters)
        if self.current is not None:
            raise ReplayError("two forwards of the model, then a backward")
        if self.model is not None and model is not self.model:
            raise ReplayError("several models are trained, or parts of one model are called one by one")
        if "FullyShardedDataParallel" in class_names or any(hasattr(parameter, "to_local") for parameter in parameters):
            raise ReplayError("the parameters are sharded (fully_shard, FSDP or DTensor)")
        if torch.is_autocast_enabled(device):
            raise ReplayError("forward runs under autocast, whose rounding hides the differences")
        if any(parameter.dtype not in (torch.float32, torch.float64) for parameter in parameters):
            raise ReplayError("parameters that are neither float32 nor float64")
        if number > _MAX_PARAMETERS:
            raise ReplayError(f"{number:,} parameters, more than {_MAX_PARAMETERS:,}")

    def _copied(self, tensor: Any) -> Any:
        update = self.recorder.update
        self.num_bytes[update] = self.num_bytes.get(update, 0) + tensor.numel() * tensor.element_size()
        if self.num_bytes[update] > _MAX_BYTES:
            raise ReplayError(f"more than {_MAX_BYTES >> 20} MiB of inputs and targets on a rank for an update")
        return tensor.detach().clone()

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, _PLAIN_TYPES):
                raise ReplayError(f"an input of the model is a {type(value).__name__}")
            return value
        if value.requires_grad:
            raise ReplayError("an input of the model needs a gradient")
        return self._copied(value)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self.known:
            return TensorReference(id(value))
        if value.requires_grad:
            raise ReplayError("the loss depends on the model's output and on another tensor that needs a gradient")
        return self._copied(value)


def _needed_calls(backward: RecordedBackward) -> list[RecordedCall]:
    """Return the calls that the loss depends on, in order. Other calls may compute values for a log."""
    needed, calls = {backward.loss_id}, list[RecordedCall]()

    def need(value: Any) -> None:
        if isinstance(value, TensorReference):
            needed.add(value.tensor_id)

    for call in reversed(backward.calls):
        if needed.intersection(call.results):
            calls.append(call)
            tree_map(need, (call.args, call.kwargs))
    return calls[::-1]


def generator_states(model: Any) -> list[Any]:
    """States of the CPU's generator, and of the generator of the model's CUDA device."""
    device = next(model.parameters()).device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _state_of(model: Any) -> ModelState:
    tensors_by_name = [*model.named_parameters(), *model.named_buffers()]
    copies = {name: value.detach().clone() for name, value in tensors_by_name}
    return ModelState(copies, [module.training for module in model.modules()])


class _CallMode(TorchFunctionMode):
    """Records each torch function that the script calls outside of its model."""

    def __init__(self, replay_recorder: ReplayRecorder) -> None:
        super().__init__()
        self.replay_recorder = replay_recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replay_recorder = self.replay_recorder
        out = func(*args, **(kwargs or {}))
        if replay_recorder.known and replay_recorder.losses.depth == 0 and replay_recorder.is_wanted:
            replay_recorder.record_call(func, args, kwargs or {}, out)
        return out


def install_replay_recording(replay_recorder: ReplayRecorder) -> None:
    """Install the hooks that record updates for the replay. Call it after the other hooks, so that it wraps them."""
    module_call, autograd_backward = torch.nn.Module.__call__, torch.autograd.backward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_recorded = replay_recorder.is_wanted and replay_recorder.losses.depth == 0 and torch.is_grad_enabled()
        if not is_recorded or not any(parameter.requires_grad for parameter in self.parameters()):
            return module_call(self, *args, **kwargs)
        replay_recorder.start_forward(self, args, kwargs)
        output = module_call(self, *args, **kwargs)
        replay_recorder.end_forward(output)
        return output

    def backward(*args: Any, **kwargs: Any) -> Any:
        if not replay_recorder.is_wanted:
            return autograd_backward(*args, **kwargs)
        gradients = list(tensors((args[1:2], kwargs.get("grad_tensors"))))
        recorded = replay_recorder.end_backward(args[0] if args else kwargs.get("tensors"), bool(gradients))
        recorder, terms = replay_recorder.recorder, replay_recorder.losses.terms
        update, micro = recorder.update, recorder.micro
        out = autograd_backward(*args, **kwargs)
        if recorded is not None:
            recorded.losses = [term for term in terms if term.scale]
            replay_recorder.write(recorded, update, micro)
        return out

    torch.nn.Module.__call__, torch.autograd.backward = call, backward
    _CallMode(replay_recorder).__enter__()
