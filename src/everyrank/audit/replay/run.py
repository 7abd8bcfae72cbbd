"""Runs recorded updates again on rank 0, in float64, to get the gradient of all samples of an update.

It runs when the script has ended, on the script's model. `torch.func.functional_call` uses the parameters and buffers
from before the update, so the model is not copied and no hook of DistributedDataParallel runs. The replay calls no
collectives, because other ranks may have exited.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from everyrank.audit.events import ReplayedUpdate, Unchecked
from everyrank.audit.replay.recording import ReplayRecorder, generator_states
from everyrank.audit.replay.state import ModelState, RecordedBackward, ReplayError, TensorReference, backward_path
from everyrank.audit.watch.gradients import sample
from everyrank.audit.watch.losses import DROPOUTS
from everyrank.audit.watch.recorder import tensors

__all__ = ["run_replay", "term_weights"]

_TIMEOUT_SECONDS = 60.0  # for the replay of all updates
_WAIT_SECONDS = 15.0  # how long rank 0 waits for the other ranks to end their training
_WEIGHT_TOLERANCE = 1e-6  # relative


def run_replay(replay_recorder: ReplayRecorder) -> None:
    """Replay the recorded updates and write their gradients, if this process is rank 0."""
    recorder = replay_recorder.recorder
    replay_recorder.is_over = True
    if replay_recorder.states:
        _wait_for_all(replay_recorder)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    for update, state in sorted(replay_recorder.states.items()):
        if update >= recorder.update:
            break  # the script ended before optimizer.step() of this update
        try:
            with recorder.muted(), _settings_restored(replay_recorder.model, state):
                backwards = _read_backwards(replay_recorder, update)
                replay = _Replay(replay_recorder, state, backwards, deadline)
                recorder.arrays(f"replay{update}", replay.content())
        except Exception as error:
            recorder.write(Unchecked(message=f"replay of update {update}: {_reason(error)}"))
            return  # later updates would fail for the same reason
        weights = {f"{rank}.{micro}": weight for (rank, micro), weight in zip(backwards, replay.weights, strict=True)}
        recorder.write(
            ReplayedUpdate(
                number=update,
                weights=weights,
                has_term_weights=replay.has_term_weights,
                batch_norm_failure=replay.batch_norm_failure,
                without_dropout=replay.overrides.skips_dropout,
                sizes=replay.sizes,
            )
        )


def _wait_for_all(replay_recorder: ReplayRecorder) -> None:
    """Wait until the other ranks have ended, so that their files are complete, or until it takes too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    paths = [replay_recorder.recorder.folder / f"done{rank}" for rank in range(1, replay_recorder.world_size)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)


def _reason(error: Exception) -> str:
    """Why an update cannot be replayed, in one line."""
    if isinstance(error, CollectiveCalledError):
        return "the model or the loss calls a collective"
    if isinstance(error, ReplayError):
        return str(error)
    message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"the replay in float64 fails ({message[:200]})"


def term_weights(backwards: Sequence[RecordedBackward]) -> list[float] | None:
    """The factors for the backwards that give each of all N loss terms the weight 1/N.

    None if no loss was recorded, if the terms of a loss are unknown, if the backwards have different losses, or if the
    losses of a backward need different factors.
    """
    if len({tuple((loss.name, loss.line) for loss in backward.losses) for backward in backwards}) != 1:
        return None
    weights: list[list[float]] = []  # by loss
    for losses in zip(*(backward.losses for backward in backwards), strict=True):
        scales = [loss.scale for loss in losses if loss.scale and loss.terms and loss.reduction in ("mean", "sum")]
        if len(scales) < len(losses):
            return None
        count = sum(loss.terms for loss in losses)
        factors = [loss.terms if loss.reduction == "mean" else 1.0 for loss in losses]
        weights.append([factor / (count * scale) for factor, scale in zip(factors, scales, strict=True)])
    if not weights or not np.allclose(weights, weights[0], rtol=_WEIGHT_TOLERANCE, atol=0):
        return None
    return weights[0]


def _read_backwards(replay_recorder: ReplayRecorder, update: int) -> dict[tuple[int, int], RecordedBackward]:
    """The backwards of an update on all ranks, by (rank, number)."""
    folder = replay_recorder.recorder.folder
    paths: dict[int, list[Any]] = {}
    for rank in range(replay_recorder.world_size):
        paths[rank] = sorted(folder.glob(backward_path(folder, rank, update, "*").name), key=_micro)
        if not paths[rank]:
            raise ReplayError(f"rank {rank} has not recorded it")
    device = next(replay_recorder.model.parameters()).device

    def on_device(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda(device.index)

    return {
        (rank, _micro(path)): torch.load(path, map_location=on_device, weights_only=False)
        for rank, rank_paths in paths.items()
        for path in rank_paths
    }


def _micro(path: Path) -> int:
    return int(path.stem.rpartition(".")[2])


class _Replay:
    """Computes the gradient of an update from each backward, and from all samples as one batch."""

    def __init__(
        self,
        replay_recorder: ReplayRecorder,
        state: ModelState,
        backwards: dict[tuple[int, int], RecordedBackward],
        deadline: float,
    ) -> None:
        self.model, self.state, self.deadline = replay_recorder.model, state, deadline
        self.names = {
            name: replay_recorder.gradients.names[id(p)] for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.keys, self.backwards = list(backwards), list(backwards.values())
        self.world_size = replay_recorder.world_size
        weights = term_weights(self.backwards)
        self.weights = weights or [1 / len(self.backwards)] * len(self.backwards)
        # the script may give several losses any weights
        self.has_term_weights = weights is not None and len(self.backwards[0].losses) == 1
        # why the effect of batch norm could not be measured; "sends" if forward or loss calls a collective
        self.batch_norm_failure = ""
        self.sizes = [num_rows(backward) for backward in self.backwards]
        self.overrides = LayerOverrides()

    def content(self) -> dict[str, np.ndarray]:
        """Up to 2,048 elements of each gradient (see `sample`), by "kind name".

        backward.R.M       gradient of backward M of rank R, from its recorded loss
        whole              the weighted sum of these gradients, which the optimizer should get
        merged             gradient of all samples as one batch, without dropout
        merged_local_norm  the same with batch norm over the samples of one backward at a time
        without_dropout    the same as whole, without dropout
        """
        arrays: dict[str, np.ndarray] = {}
        try:
            gradients = self.backward_gradients()
        except CollectiveCalledError:
            self.batch_norm_failure = "sends"
            try:
                return self._named("merged", self.merged(None))
            except Exception as error:
                raise ReplayError(
                    f"the model calls a collective in its forward, and a replay as one batch fails: {_reason(error)}"
                ) from error
        for (rank, micro), gradient in zip(self.keys, gradients, strict=True):
            arrays |= self._named(f"backward.{rank}.{micro}", gradient)
        total_gradient = self.weighted(gradients)
        arrays |= self._named("whole", total_gradient)
        if self.overrides.num_norms and len(self.backwards) > 1:
            try:
                arrays |= self._batch_norm_gradients(total_gradient)
            except Exception as error:
                self.batch_norm_failure = _reason(error)
        return arrays

    def _batch_norm_gradients(self, total_gradient: dict[str, Any]) -> dict[str, np.ndarray]:
        if self.overrides.has_drawn:
            self.overrides.skips_dropout = True
            total_gradient = self.weighted(self.backward_gradients())
        return {
            **self._named("merged", self.merged(None)),
            **self._named("merged_local_norm", self.merged(self.sizes)),
            **self._named("without_dropout", total_gradient),
        }

    def backward_gradients(self) -> list[dict[str, Any]]:
        """The gradient of each backward in float64."""
        return [
            self.gradient(lambda model, backward=backward: self._loss_of(model, backward), False)
            for backward in self.backwards
        ]

    def weighted(self, each_backward: list[dict[str, Any]]) -> dict[str, Any]:
        names = {name: None for gradient in each_backward for name in gradient}
        weighted_pairs = list(zip(self.weights, each_backward, strict=True))
        return {
            name: sum(weight * gradient[name] for weight, gradient in weighted_pairs if name in gradient)
            for name in names
        }

    def merged(self, segments: list[int] | None) -> dict[str, Any]:
        """The gradient of all samples as one batch. With `segments`, batch norm splits the batch into these sizes."""
        sizes = self.sizes
        inputs = merged_batch([backward.inputs for backward in self.backwards], sizes)

        def loss_of(model: Any) -> Any:
            args, kwargs = to_float64(inputs)
            outputs = list(tensors(self._forward(model, args, kwargs, self.backwards[0].rng_states)))
            if self.overrides.has_drawn:
                raise ReplayError(
                    "forward draws random numbers, and draws others if all samples are merged into one batch"
                )
            ends = np.cumsum(sizes).tolist()
            losses = [
                _follow(backward, [output_rows(out, end - size, end, ends[-1]) for out in outputs])
                for backward, size, end in zip(self.backwards, sizes, ends, strict=True)
            ]
            return sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))

        self.overrides.segments = segments
        try:
            return self.gradient(loss_of, True)
        finally:
            self.overrides.segments = None

    def gradient(self, loss_of: Callable[[Any], Any], is_merged: bool) -> dict[str, Any]:
        """The gradient of `loss_of(model)`, by name.

        Backward runs inside functional_call, so that activation checkpointing recomputes with the same tensors.
        """
        if time.monotonic() > self.deadline:
            raise ReplayError(f"the replay took more than {_TIMEOUT_SECONDS:g} s")
        copies = {name: to_float64(value) for name, value in self.state.tensors.items()}
        trained_tensors = {name: copies[name].requires_grad_() for name in self.names}
        holder = _Holder(self.model)
        self.overrides.num_norms, self.overrides.has_drawn = 0, False

        def function(model: Any) -> None:
            torch.autograd.backward(loss_of(model))

        size = 1 if is_merged else self.world_size
        with fake_process_group(size), self.overrides:
            model_tensors = {f"model.{name}": value for name, value in copies.items()}
            torch.func.functional_call(holder, model_tensors, (function,))
        return {name: value.grad for name, value in trained_tensors.items() if value.grad is not None}

    def _loss_of(self, model: Any, backward: RecordedBackward) -> Any:
        args, kwargs = to_float64(backward.inputs)
        return _follow(backward, list(tensors(self._forward(model, args, kwargs, backward.rng_states))))

    def _forward(self, model: Any, args: Any, kwargs: Any, rng_states: list[Any]) -> Any:
        torch.set_rng_state(rng_states[0])
        for cuda in rng_states[1:]:
            torch.cuda.set_rng_state(cuda, next(model.parameters()).device)
        out = model(*args, **kwargs)
        self.overrides.has_drawn |= not all(map(torch.equal, generator_states(model), rng_states))
        return out

    def _named(self, kind: str, gradient: dict[str, Any]) -> dict[str, np.ndarray]:
        return {f"{kind} {self.names[name]}": sample(value) for name, value in gradient.items()}


class _Holder(torch.nn.Module):
    """Lets functional_call run any function of a model with other parameters, not only the forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.model)


def _follow(backward: RecordedBackward, outputs: Sequence[Any]) -> Any:
    """The loss of a backward, computed from the model's outputs by the recorded functions."""
    known_tensors = dict(zip(backward.outputs, outputs, strict=True))

    def value_of(value: Any) -> Any:
        if not isinstance(value, TensorReference):
            return to_float64(value)
        if value.tensor_id not in known_tensors:
            raise ReplayError("the loss depends on a tensor that was not recorded as computed from the model's output")
        if known_tensors[value.tensor_id] is None:
            raise ReplayError("the model's output has no dimension of samples (the model computes its loss itself)")
        return known_tensors[value.tensor_id]

    for call in backward.calls:
        args, kwargs = tree_map(value_of, (call.args, call.kwargs))
        with torch.set_grad_enabled(call.grad_enabled):
            known_tensors |= dict(zip(call.results, tensors(call.function(*args, **kwargs)), strict=True))
    loss = value_of(TensorReference(backward.loss_id))
    if not loss.requires_grad:
        raise ReplayError("the loss is computed by an autograd.Function of the script's own")
    return loss


def to_float64(value: Any) -> Any:
    """A copy of nested values with floating-point tensors in float64."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(torch.float64, copy=True) if leaf.is_floating_point() else leaf.clone()

    return tree_map(copied, value)


# --- several forward passes as one


def output_rows(out: Any, start: int, end: int, total: int) -> Any:
    """The samples from `start` to `end` of an output; None if its first dim is not the samples."""
    return out[start:end] if out.dim() and out.shape[0] == total else None


def num_rows(backward: RecordedBackward) -> int:
    """The number of samples of a forward: the first dim of its first tensor with dims."""
    return next((len(tensor) for tensor in tensors(backward.inputs) if tensor.dim()), 1)


def merged_batch(inputs: Sequence[Any], sizes: list[int]) -> Any:
    """The inputs of several forwards as one batch. Tensors with a row for each sample are concatenated."""
    flattened = [tree_flatten(value) for value in inputs]
    if any(spec != flattened[0][1] for _, spec in flattened):
        raise ReplayError("the forwards of an update have arguments of different structure")
    merged: list[Any] = []
    for leaves in zip(*(values for values, _ in flattened), strict=True):
        if not isinstance(leaves[0], torch.Tensor):
            is_equal = all(leaf == leaves[0] for leaf in leaves)
        elif all(leaf.dim() and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True)):
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                raise ReplayError("the forwards of an update have samples of different shapes")
            merged.append(torch.cat(list(leaves)))
            continue
        else:
            is_equal = all(leaf.shape == leaves[0].shape and torch.equal(leaf, leaves[0]) for leaf in leaves)
        if not is_equal:
            raise ReplayError("an input without a row for each sample differs between the forwards of an update")
        merged.append(leaves[0])
    return tree_unflatten(merged, flattened[0][1])


# --- replacements for collectives, dropout and batch norm

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce", "gather", "scatter", "barrier"),
    *("send", "recv", "isend", "irecv", "broadcast_object_list", "_all_gather_base"),
    *("all_gather_single", "reduce_scatter_single", "gather_single"),  # since torch 2.13; the last since 2.14
)


class CollectiveCalledError(Exception):
    """The model or the loss calls a collective."""


@contextlib.contextmanager
def _settings_restored(model: Any, state: ModelState) -> Generator[None]:
    """Set train modes, default dtype and grad mode for the replay. Restore them and the random state afterwards."""
    modules = list(model.modules())
    settings_before = [module.training for module in modules], torch.get_default_dtype(), torch.is_grad_enabled()
    devices = [parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.random.fork_rng(devices):
            for module, is_training in zip(modules, state.are_training, strict=True):
                module.training = is_training
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(True)
            yield
    finally:
        for module, is_training in zip(modules, settings_before[0], strict=True):
            module.training = is_training
        torch.set_default_dtype(settings_before[1])
        torch.set_grad_enabled(settings_before[2])


# functions that may cast their first argument
_CASTS = (
    *(torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.sum, torch.Tensor.mean),
    *(torch.sum, torch.mean, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.Tensor.log_softmax),
    *(F.softmax, F.log_softmax),
)
_FLOAT64_NAMES: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.FloatTensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor",
    "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
}


def _cast_to_float64(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call of torch in which a cast to float32 is one to float64. Other calls are unchanged.

    Models cast to float32 before a norm or a softmax, for example. This would round the tensors of the replay.
    """
    if func is torch.Tensor.float:
        return torch.Tensor.double, args, kwargs
    if func not in _CASTS:
        return func, args, kwargs

    def in_float64(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.double() if value.dtype is torch.float32 else value
        return _FLOAT64_NAMES.get(value, value) if isinstance(value, (torch.dtype, type, str)) else value

    args = (*args[:1], *(in_float64(value) for value in args[1:]))
    return func, args, {name: in_float64(value) for name, value in kwargs.items()}


class LayerOverrides(TorchFunctionMode):
    """Counts batch norms and keeps float64. Can disable dropout, and can let batch norm use segments of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_norms, self.has_drawn, self.skips_dropout = 0, False, False
        self.segments: list[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS and self.skips_dropout:
            return args[0] if args else kwargs["input"]
        if func is F.batch_norm and _normalises_over_batch(args, kwargs):
            self.num_norms += 1
            if self.segments is not None:
                rows_per_sample, rest = divmod(len(args[0]), sum(self.segments))
                if rest:
                    raise ReplayError("batch norm over rows that are not samples")
                segments = args[0].split([size * rows_per_sample for size in self.segments])
                return torch.cat([func(rows, *args[1:], **kwargs) for rows in segments])
        func, args, kwargs = _cast_to_float64(func, args, kwargs)
        return func(*args, **kwargs)


def _normalises_over_batch(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


class _RaiseOnCollectives(TorchDispatchMode):
    """Raises for collectives that `fake_process_group` does not replace."""

    supports_higher_order_operators = True  # torch refuses flex_attention and torch.cond under any other mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CollectiveCalledError
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_process_group(size: int) -> Generator[None]:
    """Within the block, torch.distributed reports `size` ranks, and a collective raises an error.

    With one rank, a synchronous all_reduce does nothing.
    """

    def raise_called(*_args: Any, **_kwargs: Any) -> Any:
        raise CollectiveCalledError

    def unchanged(*args: Any, async_op: bool = False, **_kwargs: Any) -> None:
        if async_op or any(args[3:]):
            raise CollectiveCalledError

    replacements = {name: unchanged if size == 1 and name == "all_reduce" else raise_called for name in _COLLECTIVES}
    replacements |= {"get_world_size": lambda *_, **__: size, "get_rank": lambda *_, **__: 0}
    with _replaced(dist, replacements), _replaced(dist.distributed_c10d, replacements), _RaiseOnCollectives():
        yield


@contextlib.contextmanager
def _replaced(module: Any, replacements: dict[str, Any]) -> Generator[None]:
    """Replace functions of a module, by name, within the block."""
    originals = {name: getattr(module, name) for name in replacements if hasattr(module, name)}
    try:
        for name in originals:
            setattr(module, name, replacements[name])
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)
