"""Every rank holds a part of parameters, gradients and optimizer state: torch's `fully_shard` (FSDP2).

Each block is a unit: its parameters are gathered before it runs and let go after it. Modules that share a weight
must be in one unit, or the shards of that weight would be updated apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors  # pyright: ignore[reportPrivateUsage]  (what fully_shard uses)

from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import FSDPOptions
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.precision import mixed_dtype

__all__ = [
    "apply_fsdp",
    "apply_fsdp_to_blocks",
    "check_output",
    "fsdp_units",
    "is_sharded",
    "reshard",
    "reshard_after",
    "scalar_parameters",
    "set_requires_all_reduce",
]


def apply_fsdp(
    model: nn.Module, blocks: list[nn.Module], layout: Layout, mesh: Mesh, experts: Sequence[nn.Module] = ()
) -> None:
    """Shard each block, then what is left with the root. The model is changed in place.

    On an axis of replicas (HSDP) gradients are reduced over both axes, and gathers stay on the axis of the shards.
    `experts`, of which other ranks hold others, are units of their own over those that hold the same. Raises
    `UnsupportedLayoutError` for experts that cannot be cut into as many parts.
    """
    policy = _policy(layout)
    root_policy = dataclasses.replace(policy, output_dtype=torch.float32 if mixed_dtype(layout) else None)
    options: dict[str, Any] = {"mesh": _device_mesh(mesh), "ignored_params": set(scalar_parameters(model))}
    reshards = layout.read(FSDPOptions).reshard_after_forward
    for module in experts:
        own: dict[str, Any] = {"mesh": mesh.expert_device_mesh(*_axes(mesh)), "mp_policy": policy}
        cut = functools.partial(_cut_experts, mesh.size("shard", "context"))
        fully_shard(module, reshard_after_forward=reshards, shard_placement_fn=cut, **own)
    for unit in fsdp_units(model, blocks):
        fully_shard(unit[0] if len(unit) == 1 else unit, mp_policy=policy, reshard_after_forward=reshards, **options)
    # backward starts with the root: letting go of it would only gather it again
    fully_shard(model, mp_policy=root_policy, reshard_after_forward=False, **options)


def apply_fsdp_to_blocks(blocks: list[nn.Module], layout: Layout, mesh: Mesh) -> None:
    """Shard each block by itself, where the layout has that axis: nothing outside of them is gathered with them."""
    if mesh.size("shard") == 1:
        return
    policy, device_mesh = _policy(layout), _device_mesh(mesh)
    for block in blocks:
        replicated = set(scalar_parameters(block))
        fully_shard(block, mesh=device_mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=replicated)


def _policy(layout: Layout) -> MixedPrecisionPolicy:
    """Parameters are gathered and used in low precision; gradients are summed in float32."""
    low = mixed_dtype(layout)
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """An explicit mesh: without one torch takes all ranks of the default device type."""
    return mesh.device_mesh(*_axes(mesh))


def _axes(mesh: Mesh) -> tuple[str, ...]:
    return ("replicate", "shard") if mesh.size("replicate") > 1 else ("shard",)


def _cut_experts(degree: int, parameter: nn.Parameter) -> Shard:
    """Which dimension of stacked experts is sharded: not the first, along which the expert axis has split them."""
    for dim in range(1, parameter.dim()):
        if parameter.shape[dim] % degree == 0:
            return Shard(dim)
    raise UnsupportedLayoutError(
        f"experts of shape {tuple(parameter.shape)}: no dimension behind the first divides by the {degree} ranks that "
        "shard an expert; take a degree of shard that divides one"
    )


def is_sharded(parameter: Tensor) -> bool:
    """Whether `fully_shard` reduces the gradients of this parameter."""
    return isinstance(parameter, DTensor) and "shard" in (parameter.device_mesh.mesh_dim_names or ())


def fsdp_units(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """FSDP units. Blocks with tied weights are one; a block tied to a module outside is in none: the root shards it."""
    units: list[list[nn.Module]] = [[block] for block in blocks]
    inside = {part for block in blocks for part in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    of_root = {parameter for module in outside for parameter in module.parameters(recurse=False)}
    kept: list[list[nn.Module]] = []
    for unit in units:
        own = set(unit[0].parameters())
        if own & of_root:
            continue  # it stays in the root's unit, together with the module that has the same weight
        tied = [group for group in kept if any(own & set(member.parameters()) for member in group)]
        kept = [group for group in kept if group not in tied]
        kept.append([member for group in tied for member in group] + unit)
    return kept


def scalar_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters without a dimension to shard; every rank keeps them whole."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 0]


def set_requires_all_reduce(model: nn.Module, is_last: bool) -> None:
    """Whether the next backward sends gradients to the other replicas: only that of the last micro-batch has to."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def check_output(output: Any) -> None:
    """Raise `UnsupportedLayoutError` for an output in which torch finds no tensor to hook.

    `fully_shard` starts to reduce gradients when backward reaches an output of the model. It looks into lists, tuples,
    dicts and dataclasses; behind anything else gradients are left alone, and nothing says so.
    """
    found: list[bool] = []
    _apply_to_tensors(lambda tensor: found.append(tensor.requires_grad) or tensor, output)
    if not any(found):
        raise UnsupportedLayoutError(
            f"fsdp: the model returns {type(output).__name__}, in which torch's fully_shard finds no tensor with a "
            "gradient, and would reduce none; return tensors, and make the object in the loss"
        )


def reshard_after(model: nn.Module, output: Any) -> Any:
    """`reshard` after a forward pass; its output, copied where it is a view of a gathered parameter.

    The memory of those goes away: a model may return `self.scale.expand(...)`.
    """
    gathered = {one.untyped_storage().data_ptr() for one in model.parameters() if not isinstance(one, DTensor)}

    def kept(tensor: Tensor) -> Tensor:
        is_view = not isinstance(tensor, DTensor) and tensor.untyped_storage().data_ptr() in gathered
        return tensor.clone() if is_view else tensor

    output = map_tensors(output, kept)
    reshard(model)
    return output


def reshard(model: nn.Module) -> None:
    """Let go of every gathered parameter. After a forward without a backward the root's would stay gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
