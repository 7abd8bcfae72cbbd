"""Build the model: seeded on every rank, or part by part for a model that does not fit on a rank.

With `meta=true` every rank builds the model on torch's meta device, with shapes but no memory, and splits it there.
Then each rank allocates its parts. Only rank 0 builds the full model (in files, not in memory) and broadcasts it tensor
by tensor. The bits are the same as when every rank builds it in full. The peak memory is the parts of a rank and one
tensor.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from everyrank.data.loader import map_tensors
from everyrank.errors import CannotRunError, WorkloadError
from everyrank.layout import Layout
from everyrank.layout.options import BuildOptions, DeviceOptions
from everyrank.parallel.file_backed import built_in_files, put_into_file
from everyrank.parallel.precision import param_dtype
from everyrank.parallel.state_memory import refuse_too_large
from everyrank.workload import Workload
from everyrank.world import World
from everyrank.world.collectives import broadcast_value

__all__ = ["init_model", "materialise", "on_cpu", "on_meta", "seed_everything", "shared_parameters"]


def seed_everything(seed: int) -> None:
    """Seed all generators that model code may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def init_model(
    workload: Workload, layout: Layout, world: World, dtype: torch.dtype | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return (the model on this rank's device, None), or with meta=true (the model on meta, rank 0's full model).

    `dtype` is that of the parameters; None for the layout's.

    Raises `WorkloadError` for a value that is no module, and `CannotRunError` if a rank lacks the devices it needs.
    """
    dtype = dtype or param_dtype(layout)
    if not layout.read(BuildOptions).meta:
        with refuse_too_large(layout, world, dtype) if workload.num_devices == 1 else contextlib.nullcontext():
            model = _called(workload, layout, world)
        return model.to(dtype) if workload.num_devices > 1 else model.to(world.device, dtype), None
    full = None
    if world.rank == 0:
        with built_in_files():
            full = _called(workload, layout, world)
        for tensor in (*full.parameters(), *full.buffers()):
            put_into_file(tensor, dtype if tensor.is_floating_point() else None)
    try:
        with torch.device("meta"):
            model = _called(workload, layout, world)
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0]
        raise WorkloadError(
            f"layout {layout}: the model cannot be built on the meta device ({first_line}); leave out meta"
        ) from error
    return model.to("meta", dtype), full


def _called(workload: Workload, layout: Layout, world: World) -> nn.Module:
    seed_everything(workload.seed)
    make: Any = workload.model
    if workload.num_devices > 1:
        devices = _devices(layout, world)
        places = [devices[index * len(devices) // workload.num_devices] for index in range(workload.num_devices)]
        model: object = make(places)
        if isinstance(model, nn.Module):
            _keep_together(model, places[0], world.device)
    else:
        model = make()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"workload {workload.name}: model() returned {type(model).__name__}, not an nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():  # a model is put into one floating-point precision, which has no imaginary part
            raise WorkloadError(
                f"workload {workload.name}: {name} of the model is {tensor.dtype}; keep it as two real numbers "
                "(torch.view_as_real) and make it complex in forward (torch.view_as_complex)"
            )
    return model


def on_cpu(workload: Workload) -> nn.Module:
    """Build the model on CPU to inspect it, without seeding."""
    make: Any = workload.model
    return make([torch.device("cpu")] * workload.num_devices) if workload.num_devices > 1 else make()


def on_meta(workload: Workload) -> nn.Module:
    """Build the model on the meta device. Raises what the model raises if it needs values."""
    with torch.device("meta"):
        make: Any = workload.model
        return make([torch.device("meta")] * workload.num_devices) if workload.num_devices > 1 else make()


def _devices(layout: Layout, world: World) -> list[torch.device]:
    """Return the devices of this rank, one or as many as the layout requests; on CPU they are all the same."""
    count = layout.read(DeviceOptions).devices
    if world.device.type != "cuda" or count == 1:
        return [world.device] * count
    if world.backend == "nccl" and world.size > 1:
        raise CannotRunError(
            f"layout {layout}: nccl binds each rank to one device; use --backend gloo, or single:devices={count}"
        )
    needed = count * world.local_size
    if torch.cuda.device_count() < needed:
        raise CannotRunError(f"needs {needed} CUDA devices, {count} for each rank of this host")
    return [torch.device("cuda", world.local_rank * count + index) for index in range(count)]


def _keep_together(model: nn.Module, first: torch.device, home: torch.device) -> None:
    """Move inputs to the model's first device and outputs back to the device of the targets."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, lambda tensor: tensor.to(first)), map_tensors(kwargs, lambda tensor: tensor.to(first))

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(lambda _, __, output: map_tensors(output, lambda tensor: tensor.to(home)))


@torch.no_grad()
def materialise(model: nn.Module, full: nn.Module | None, world: World) -> None:
    """Allocate this rank's parts of a model on the meta device and fill them from rank 0. A collective.

    Raises `WorkloadError` if rank 0's model has different tensors.
    """
    ties = shared_parameters(model)
    model.to_empty(device=world.device)
    for (first_module, first_name), *others in ties:  # which `to_empty` has untied
        shared = model.get_submodule(first_module).get_parameter(first_name)
        for module, name in others:
            setattr(model.get_submodule(module), name, shared)
    places = _tensors(model)
    for name, whole in _hand_out(full, world):
        target = places.pop(name, None)
        if isinstance(target, DTensor):
            shape, start = compute_local_shape_and_global_offset(whole.shape, target.device_mesh, target.placements)
            slices = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
            target.to_local().copy_(whole[slices])
        elif target is not None:
            target.copy_(whole)
    if places:
        raise WorkloadError(f"meta=true: rank 0 built the model without {min(places)}; build it alike on all ranks")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, persistent or not; of shared tensors only the first."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _hand_out(full: nn.Module | None, world: World) -> Iterator[tuple[str, Tensor]]:
    """Broadcast each tensor of rank 0's model in turn; yield its name and values. A collective."""
    tensors = _tensors(full) if full is not None else {}
    if full is not None:  # buffers under all names, because a pipeline stage may lack the block of the first name
        tensors |= dict(full.named_buffers(remove_duplicate=False))
    headers = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()]
    for name, shape, dtype in broadcast_value(0, headers, world):
        if full is not None:
            whole = tensors.pop(name).contiguous().to(world.device)
        else:
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        if world.size > 1 and whole.numel():
            dist.broadcast(whole, src=0, group=world.group)
        yield name, whole


def shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return parameters that several modules share, each as a list of (module, name)."""
    places: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module_name, name))
    return [shared for shared in places.values() if len(shared) > 1]
