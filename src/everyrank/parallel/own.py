"""Own parallel code around a model: its mesh, the call of the person's function, and how the tensors lie afterwards."""

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

from everyrank.errors import UnsupportedLayoutError, WorkloadError, describe, is_own
from everyrank.layout import OwnCode
from everyrank.parallel.full_state import without_advice
from everyrank.parallel.mesh import full_tensor, local_tensor, make_device_mesh
from everyrank.parallel.own_precision import without_mixed_precision
from everyrank.world import World

__all__ = [
    "apply_own_code",
    "clean_name",
    "forward_error",
    "gathered_state",
    "lying",
    "own_device_mesh",
    "replicated_axes",
    "require_known",
    "sum_squares_of_parts",
    "unwrapped",
    "whole_state",
    "without_frames",
]

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WAIT = 0.9  # of the timeout: before other ranks give up on this one, and name no line


def own_device_mesh(code: OwnCode, world: World) -> DeviceMesh:
    """Torch's mesh over all ranks, with the axes of the contract; one that is one rank long has its dimension, too."""
    return make_device_mesh(world, tuple(code.axes.items()))


def apply_own_code(code: OwnCode, model: nn.Module, mesh: DeviceMesh, world: World) -> nn.Module:
    """What the person's function makes of the model. Raises `WorkloadError` where that is none, or never comes."""
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.get_default_dtype())
    with (
        _limited(code, _WAIT * world.timeout_seconds, world.timeout_seconds),
        _made_in(dtype),
        without_mixed_precision(),
    ):
        made: object = code.function(model, mesh)
    if not isinstance(made, nn.Module):
        hint = ": end it with `return model`" if made is None else ""
        raise WorkloadError(f"{code.place} returned {type(made).__name__}, not an nn.Module{hint}")
    return made.train()


@contextlib.contextmanager
def without_frames() -> Generator[None]:
    """Torch logs the frames of an error in a DTensor's shapes before it raises it: the error says where it was."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _made_in(dtype: torch.dtype) -> Generator[None]:
    """What a function builds anew is of the model's own dtype: in float64 a float32 copy would be another model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _limited(code: OwnCode, seconds: float, timeout: float) -> Generator[None]:
    """Raise `WorkloadError`, with the line, in what takes longer; collectives have the timeout of their group."""

    def stop(_: int, frame: Any) -> None:
        own = [one for one in traceback.extract_stack(frame) if is_own(one.filename)]
        line = f" at line {own[-1].lineno}" if own else ""
        raise WorkloadError(f"{code.place} has not returned after {seconds:g} s (--timeout {timeout:g}){line}")

    if threading.current_thread() is not threading.main_thread():  # no other thread can be interrupted
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
    """A name without what wrappers put into it: `module.blocks.0._orig_mod.weight` -> `blocks.0.weight`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile, whose names checkpoints have."""
    while type(model).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        model = next(model.children())
    return model


def lying(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The tensors of which it is known how they lie on the ranks, under the names that they had when they were built.

    `shapes` are those of then: a DTensor that has its shape still can be put together, any other tensor that has it is
    all there; what has another shape is a part that nothing tells the place of.
    """
    built = {clean_name(name): name for name in shapes}
    named = {built.get(clean_name(name), ""): tensor for name, tensor in model.state_dict().items()}
    return {name: named[name] for name, shape in shapes.items() if name in named and named[name].shape == shape}


def whole_state(
    code: OwnCode, model: nn.Module, mesh: DeviceMesh, shapes: Mapping[str, torch.Size], rank: int
) -> dict[str, Tensor]:
    """The tensors that can be put together, on rank 0's CPU; {} elsewhere. A collective.

    What the contract's `gather` puts together stands in for what the ranks hold under the same name.
    """
    gathered = gathered_state(code, model, mesh, shapes)
    known = lying(unwrapped(model), shapes)
    found: dict[str, Tensor] = {}
    for name in (name for name in shapes if name in known or name in gathered):
        with without_advice():
            whole = gathered[name] if name in gathered else full_tensor(known[name].detach())
        if rank == 0:
            found[name] = whole.cpu().clone()
    return found


def gathered_state(
    code: OwnCode, model: nn.Module, mesh: DeviceMesh, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The tensors that the contract's `gather` puts together, on every rank; {} without one. A collective.

    Raises `WorkloadError` for names that the model did not have when it was built, and for other shapes.
    """
    if code.contract.gather is None:
        return {}
    with torch.no_grad():
        made: object = code.contract.gather(model, mesh)
    if not isinstance(made, Mapping):
        raise WorkloadError(f"{code.place}: gather returned {type(made).__name__}; return {{name: whole tensor}}")
    found: dict[str, Tensor] = {}
    for name, value in made.items():
        whole = full_tensor(value)
        if name not in shapes:
            near = next((one for one in shapes if one.endswith(str(name).rpartition(".")[2])), next(iter(shapes), ""))
            raise WorkloadError(
                f"{code.place}: gather returned {name}, which is no tensor of the model as it was built; its names are "
                f"those of model.state_dict() before parallelize, such as {near}"
            )
        if not isinstance(whole, Tensor) or whole.shape != shapes[name]:
            shape = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise WorkloadError(
                f"{code.place}: gather returned {name} of shape {shape}; as it was built it is {tuple(shapes[name])}"
            )
        found[name] = whole.detach()
    return found


def sum_squares_of_parts(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The sum of squares of all gradients: float64, shape (), the same on every rank.

    Of a DTensor the parts are added up over the mesh dimensions that it is split along; anything else is whole on
    every rank. A collective of these, one for each way of lying on the ranks.
    """
    sums: dict[Any, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _without_partial(parameter.grad)
            kind = (gradient.device_mesh, tuple(gradient.placements)) if isinstance(gradient, DTensor) else None
            own = torch.linalg.vector_norm(local_tensor(gradient)).double().square()
            sums[kind] = sums[kind] + own if kind in sums else own
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
    """The axes (of more than one rank) along which all ranks hold the same part of this tensor."""
    split = set[str]()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split = {name for name, how in zip(names, tensor.placements, strict=True) if not how.is_replicate()}
    return {axis for axis, size in axes.items() if size > 1 and axis not in split}


def forward_error(error: Exception, model: nn.Module, code: OwnCode) -> WorkloadError:
    """The error of a forward pass under own parallel code: the module that raised it, and what its weight takes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    frame = next((one for one in reversed(inside) if names.get(id(one.f_locals["self"]))), None)
    if frame is None:
        return WorkloadError(f"{code.place}: the model raised in forward: {_text(error)}")
    module: nn.Module = frame.f_locals["self"]
    cause = _about_linear(module, frame.f_locals.get("input"))
    what = f"{names[id(module)]} ({type(module).__name__}) raised in forward: {_text(error)}"
    return WorkloadError(f"{code.place}: {what}{cause}")


def _text(error: Exception) -> str:
    """The error, with the line where it is in a file of the person's."""
    if any(is_own(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        return describe(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"


def _about_linear(module: nn.Module, value: Any) -> str:
    """Whether a split linear layer gets a part of its features where it takes all of them, or the other way round."""
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


def require_known(names: Sequence[str], code: OwnCode) -> None:
    """Raise `UnsupportedLayoutError` for tensors whose part in the norm of the gradients is not known."""
    if names:
        raise UnsupportedLayoutError(
            f"{code.place}: {names[0]} lies on the ranks in a way that no DTensor tells, so the norm of the gradients "
            "is not known; give the contract a clip_grad_norm"
        )
