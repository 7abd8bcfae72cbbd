"""FSDP2 (`fully_shard`): every rank holds a part of parameters, gradients and optimizer state.

Each block is a unit: its parameters are gathered before it runs and freed after it. Modules that share a weight must be
in one unit, or the shards of that weight would be updated separately.
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
from everyrank.parallel.pipeline.blocks import modules_outside
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
    """Shard each block, then the remaining parameters with the root, in place.

    On an axis of replicas (HSDP) gradients are reduced over both axes, and gathers stay on the shard axis. `experts`,
    which differ between ranks, are separate units over the ranks that hold the same experts. Raises
    `UnsupportedLayoutError` for experts that do not divide.
    """
    _make_contiguous(model)
    policy = _policy(layout)
    root_policy = dataclasses.replace(policy, output_dtype=torch.float32 if mixed_dtype(layout) else None)
    options: dict[str, Any] = {"mesh": _device_mesh(mesh), "ignored_params": set(scalar_parameters(model))}
    reshards = layout.read(FSDPOptions).reshard_after_forward
    for module in experts:
        expert_options: dict[str, Any] = {"mesh": mesh.expert_device_mesh(*_axes(mesh)), "mp_policy": policy}
        cut = functools.partial(_cut_experts, mesh.size("shard", "context"))
        fully_shard(module, reshard_after_forward=reshards, shard_placement_fn=cut, **expert_options)
    for unit in fsdp_units(model, blocks):
        fully_shard(unit[0] if len(unit) == 1 else unit, mp_policy=policy, reshard_after_forward=reshards, **options)
    # backward starts with the root: letting go of it would only gather it again
    fully_shard(model, mp_policy=root_policy, reshard_after_forward=False, **options)


def apply_fsdp_to_blocks(blocks: list[nn.Module], layout: Layout, mesh: Mesh) -> None:
    """Shard each block if the layout has a shard axis; parameters outside the blocks are not gathered."""
    if mesh.size("shard") == 1:
        return
    policy, device_mesh = _policy(layout), _device_mesh(mesh)
    for block in blocks:
        _make_contiguous(block)
        replicated = set(scalar_parameters(block))
        fully_shard(block, mesh=device_mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=replicated)


def _make_contiguous(module: nn.Module) -> None:
    """Give parameters that are stored in another order (transposed, channels_last) the one that torch can shard."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _policy(layout: Layout) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy: parameters in low precision, gradients summed in float32."""
    dtype = mixed_dtype(layout)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return an explicit mesh: without one torch uses all ranks of the default device type."""
    return mesh.device_mesh(*_axes(mesh))


def _axes(mesh: Mesh) -> tuple[str, ...]:
    return ("replicate", "shard") if mesh.size("replicate") > 1 else ("shard",)


def _cut_experts(degree: int, parameter: nn.Parameter) -> Shard:
    """Return the dimension to shard stacked experts along: not the first, which the expert axis splits."""
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
    """Group blocks into FSDP units: blocks with tied weights form one; blocks tied to outside go to the root."""
    outside = modules_outside(model, blocks)
    of_root = {parameter for module in outside for parameter in module.parameters(recurse=False)}
    units: list[list[nn.Module]] = []
    for unit in ([block] for block in blocks):
        parameters = set(unit[0].parameters())
        if parameters & of_root:
            continue  # it stays in the root's unit, together with the module that has the same weight
        tied = [group for group in units if any(parameters & set(member.parameters()) for member in group)]
        units = [group for group in units if group not in tied]
        units.append([member for group in tied for member in group] + unit)
    return units


def scalar_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters without a dimension to shard, and empty ones; every rank keeps them whole."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 0 or not parameter.numel()]


def set_requires_all_reduce(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward reduces gradients over replicas; only the last micro-batch needs it."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def check_output(output: Any) -> None:
    """Raise `UnsupportedLayoutError` for an output in which torch finds no tensor to hook.

    `fully_shard` starts to reduce gradients when backward reaches an output of the model. It looks into lists, tuples,
    dicts and dataclasses. For other types the gradients would silently not be reduced.
    """
    requires_grad: list[bool] = []
    _apply_to_tensors(lambda tensor: requires_grad.append(tensor.requires_grad) or tensor, output)
    if not any(requires_grad):
        raise UnsupportedLayoutError(
            f"fsdp: the model returns {type(output).__name__}, in which torch's fully_shard finds no tensor with a "
            "gradient, and would reduce none; return tensors, and make the object in the loss"
        )


def reshard_after(model: nn.Module, output: Any) -> Any:
    """Reshard after a forward pass. Returns its output, copied if it is a view of a gathered parameter.

    The memory of gathered parameters is freed, but a model may return a view such as `self.scale.expand(...)`.
    """
    gathered = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters() if not isinstance(parameter, DTensor)
    }

    def kept(tensor: Tensor) -> Tensor:
        is_view = not isinstance(tensor, DTensor) and tensor.untyped_storage().data_ptr() in gathered
        return tensor.clone() if is_view else tensor

    output = map_tensors(output, kept)
    reshard(model)
    return output


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter. After a forward without backward the root would stay gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
