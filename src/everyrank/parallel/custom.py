"""Custom parallelize functions: the device mesh, the call of the user's function, and gathering its tensors."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import traceback
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from everyrank.errors import UnsupportedLayoutError, WorkloadError, describe, is_user_code
from everyrank.layout import CustomParallelize
from everyrank.parallel.custom_precision import without_mixed_precision
from everyrank.parallel.full_state import quiet_logger, state_tensors, without_advice
from everyrank.parallel.mesh import full_tensor, local_tensor, make_device_mesh
from everyrank.world import World

__all__ = [
    "call_parallelize",
    "clean_name",
    "custom_device_mesh",
    "forward_error",
    "gatherable_tensors",
    "gathered_state",
    "quiet_fake_tensor_log",
    "replicated_axes",
    "require_gatherable",
    "sum_squares_of_parts",
    "unwrapped",
    "whole_state",
]

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WAIT = 0.9  # fraction of the timeout: this rank reports its line before the others time out


def custom_device_mesh(code: CustomParallelize, world: World) -> DeviceMesh:
    """Return a DeviceMesh over all ranks with the axes of the contract, including axes of size one."""
    return make_device_mesh(world, tuple(code.axes.items()))


def call_parallelize(code: CustomParallelize, model: nn.Module, mesh: DeviceMesh, world: World) -> nn.Module:
    """Call the user's function on the model. Raises `WorkloadError` if it returns no module or takes too long."""
    dtype = next(
        (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()),
        torch.get_default_dtype(),
    )
    with (
        _time_limit(code, _WAIT * world.timeout_seconds, world.timeout_seconds),
        _default_dtype(dtype),
        without_mixed_precision(),
    ):
        returned: object = code.function(model, mesh)
    if not isinstance(returned, nn.Module):
        hint = ": end it with `return model`" if returned is None else ""
        raise WorkloadError(f"{code.path} returned {type(returned).__name__}, not an nn.Module{hint}")
    return returned.train()


def quiet_fake_tensor_log() -> contextlib.AbstractContextManager[None]:
    """Silence torch's log of fake tensor errors in DTensor shapes; the error itself has the location."""
    return quiet_logger("torch._subclasses.fake_tensor", logging.CRITICAL)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Set the default dtype, so that tensors made by the function have the dtype of the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _time_limit(code: CustomParallelize, seconds: float, timeout: float) -> Generator[None]:
    """Raise `WorkloadError` with the line if the block takes too long; collectives have their group's timeout."""

    def stop(_: int, frame: Any) -> None:
        user_frames = [
            frame_summary for frame_summary in traceback.extract_stack(frame) if is_user_code(frame_summary.filename)
        ]
        line = f" at line {user_frames[-1].lineno}" if user_frames else ""
        raise WorkloadError(f"{code.path} has not returned after {seconds:g} s (--timeout {timeout:g}){line}")

    if threading.current_thread() is not threading.main_thread():  # signals only interrupt the main thread
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def clean_name(name: str) -> str:
    """Remove wrapper names: `module.blocks.0._orig_mod.weight` -> `blocks.0.weight`."""
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile, whose names checkpoints use."""
    while type(model).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        model = next(model.children())
    return model


def gatherable_tensors(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors that can be gathered, under the names that they had when the model was built.

    `shapes` are the shapes as built. A DTensor of equal global shape can be gathered, and a plain tensor of equal shape
    is whole. A plain tensor of a different shape is a part at an unknown position, and is left out.
    """
    built = {clean_name(name): name for name in shapes}
    named = {built.get(clean_name(name), ""): tensor for name, tensor in state_tensors(model).items()}
    return {name: named[name] for name, shape in shapes.items() if name in named and named[name].shape == shape}


def whole_state(
    code: CustomParallelize, model: nn.Module, mesh: DeviceMesh, shapes: Mapping[str, torch.Size], rank: int
) -> dict[str, Tensor]:
    """Return the tensors that can be gathered, on rank 0's CPU; {} elsewhere. A collective.

    Tensors from the contract's `gather` take precedence.
    """
    gathered = gathered_state(code, model, mesh, shapes)
    known = gatherable_tensors(unwrapped(model), shapes)
    result: dict[str, Tensor] = {}
    for name in (name for name in shapes if name in known or name in gathered):
        with without_advice():
            whole = gathered[name] if name in gathered else full_tensor(known[name].detach())
        if rank == 0:
            result[name] = whole.cpu().clone()
    return result


def gathered_state(
    code: CustomParallelize, model: nn.Module, mesh: DeviceMesh, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return the tensors from the contract's `gather` on every rank; {} without one. A collective.

    Raises `WorkloadError` for names that the model did not have when it was built, and for different shapes.
    """
    if code.contract.gather is None:
        return {}
    with torch.no_grad():
        returned: object = code.contract.gather(model, mesh)
    if not isinstance(returned, Mapping):
        raise WorkloadError(f"{code.path}: gather returned {type(returned).__name__}; return {{name: whole tensor}}")
    result: dict[str, Tensor] = {}
    for name, value in returned.items():
        whole = full_tensor(value)
        if name not in shapes:
            near = next(
                (known for known in shapes if known.endswith(str(name).rpartition(".")[2])), next(iter(shapes), "")
            )
            raise WorkloadError(
                f"{code.path}: gather returned {name}, which is no tensor of the model as it was built; its names are "
                f"those of model.state_dict() before parallelize, such as {near}"
            )
        if not isinstance(whole, Tensor) or whole.shape != shapes[name]:
            shape = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise WorkloadError(
                f"{code.path}: gather returned {name} of shape {shape}; as it was built it is {tuple(shapes[name])}"
            )
        result[name] = whole.detach()
    return result


def sum_squares_of_parts(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of squares of all gradients: float64, shape (), the same on every rank.

    DTensors are summed over the mesh dimensions that shard them. Other tensors are whole on every rank. One collective
    for each kind of placement.
    """
    sums: dict[Any, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _without_partial(parameter.grad)
            kind = (gradient.device_mesh, tuple(gradient.placements)) if isinstance(gradient, DTensor) else None
            square = torch.linalg.vector_norm(local_tensor(gradient)).double().square()
            sums[kind] = sums[kind] + square if kind in sums else square
    total = torch.zeros((), dtype=torch.float64)
    for kind, squares in sums.items():
        if kind is not None:
            mesh, placements = kind
            for dim in [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total = total.to(squares.device) + squares
    return total


def _without_partial(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        return gradient.redistribute(placements=whole)
    return gradient


def replicated_axes(tensor: Tensor, axes: Mapping[str, int]) -> set[str]:
    """Return the axes (of more than one rank) along which all ranks hold the same part of this tensor."""
    split = set[str]()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split = {name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()}
    return {axis for axis, size in axes.items() if size > 1 and axis not in split}


def forward_error(error: Exception, model: nn.Module, code: CustomParallelize) -> WorkloadError:
    """Convert an error in the forward pass of a custom function: name the module and the features it expects."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    frame = next((candidate for candidate in reversed(inside) if names.get(id(candidate.f_locals["self"]))), None)
    if frame is None:
        return WorkloadError(f"{code.path}: the model raised in forward: {_text(error)}")
    module: nn.Module = frame.f_locals["self"]
    cause = _about_linear(module, frame.f_locals.get("input"))
    subject = f"{names[id(module)]} ({type(module).__name__}) raised in forward: {_text(error)}"
    return WorkloadError(f"{code.path}: {subject}{cause}")


def _text(error: Exception) -> str:
    """Describe the error, with its line if it is in a user's file."""
    if any(is_user_code(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        return describe(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"


def _about_linear(module: nn.Module, value: Any) -> str:
    """Explain a split linear layer whose input has all features instead of a part, or the reverse."""
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) and isinstance(weight, DTensor) and isinstance(value, Tensor)):
        return ""
    takes, gets = weight.shape[1], value.shape[-1]
    if any(placement.is_shard(0) for placement in weight.placements) and gets < takes and takes % gets == 0:
        return (
            f"; its weight is split colwise, which takes all {takes} features, and it gets {gets}, the part that a "
            "colwise layer before it gives: it has to be rowwise"
        )
    if any(placement.is_shard(1) for placement in weight.placements) and gets > takes:
        return (
            f"; its weight is split rowwise, which takes a part of the {takes} features from each rank, and it gets "
            "all of them from each: it has to be colwise, or its input_layouts Replicate()"
        )
    return ""


def require_gatherable(names: Sequence[str], code: CustomParallelize) -> None:
    """Raise `UnsupportedLayoutError` for tensors that the norm of the gradients cannot include."""
    if names:
        raise UnsupportedLayoutError(
            f"{code.path}: {names[0]} is split over the ranks but is not a DTensor, so the norm of the gradients "
            "is not known; give the contract a clip_grad_norm"
        )
