"""Build the model: seeded; and one that no rank has the memory for, part by part.

With `meta=true` every rank builds the model on torch's meta device, which gives it shapes and no memory, and it is
split, sharded or cut into stages like that. Then each rank makes room for its parts, and rank 0, the only one that has
built the model in full (its numbers in files, not in memory), hands out tensor by tensor. The bits are those of
building in full everywhere; the most that a rank holds beside its parts is one tensor.
"""

from __future__ import annotations

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
from everyrank.workload import Workload
from everyrank.world import World
from everyrank.world.collectives import broadcast_value

__all__ = ["init_model", "materialise", "on_cpu", "on_meta", "seed_everything", "shared_parameters"]


def seed_everything(seed: int) -> None:
    """All generators that model code draws from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def init_model(
    workload: Workload, layout: Layout, world: World, dtype: torch.dtype | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """(the model on this rank's device, None), or with meta=true (the model without memory, rank 0's in full).

    `dtype` is that of its parameters; None: the layout's.

    Raises `WorkloadError` for what is no model, `CannotRunError` where a rank has not the devices it needs.
    """
    dtype = dtype or param_dtype(layout)
    if not layout.read(BuildOptions).meta:
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
        what = str(error).splitlines()[0]
        raise WorkloadError(
            f"layout {layout}: the model cannot be built on the meta device ({what}); leave out meta"
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
    """The model for a look at it, on CPU and not seeded."""
    make: Any = workload.model
    return make([torch.device("cpu")] * workload.num_devices) if workload.num_devices > 1 else make()


def on_meta(workload: Workload) -> nn.Module:
    """The same without memory. Raises what the model raises where it needs numbers to be built."""
    with torch.device("meta"):
        make: Any = workload.model
        return make([torch.device("meta")] * workload.num_devices) if workload.num_devices > 1 else make()


def _devices(layout: Layout, world: World) -> list[torch.device]:
    """The devices of this rank: one, or as many as the layout says; on CPU they are all the same."""
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
    """Inputs go to the model's first device; outputs come back to where the targets are."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, lambda tensor: tensor.to(first)), map_tensors(kwargs, lambda tensor: tensor.to(first))

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(lambda _, __, output: map_tensors(output, lambda tensor: tensor.to(home)))


@torch.no_grad()
def materialise(model: nn.Module, full: nn.Module | None, world: World) -> None:
    """Make room for this rank's parts of a model on the meta device, and fill them from rank 0's. A collective.

    Raises `WorkloadError` for a model that rank 0 has built with other tensors than this rank.
    """
    ties = shared_parameters(model)
    model.to_empty(device=world.device)
    for (first_module, first_name), *others in ties:  # which `to_empty` has untied
        kept = model.get_submodule(first_module).get_parameter(first_name)
        for module, name in others:
            setattr(model.get_submodule(module), name, kept)
    places = _tensors(model)
    for name, whole in _hand_out(full, world):
        place = places.pop(name, None)
        if isinstance(place, DTensor):
            shape, start = compute_local_shape_and_global_offset(whole.shape, place.device_mesh, place.placements)
            part = tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
            place.to_local().copy_(whole[part])
        elif place is not None:
            place.copy_(whole)
    if places:
        raise WorkloadError(f"meta=true: rank 0 built the model without {min(places)}; build it alike on all ranks")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are in no state; of shared ones the first."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _hand_out(full: nn.Module | None, world: World) -> Iterator[tuple[str, Tensor]]:
    """Name and numbers of each tensor of rank 0's model, one after the other, on this rank's device. A collective."""
    own = _tensors(full) if full is not None else {}
    about = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in own.items()]
    for name, shape, dtype in broadcast_value(0, about, world):
        if full is not None:
            whole = own.pop(name).contiguous().to(world.device)
        else:
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        if world.size > 1 and whole.numel():
            dist.broadcast(whole, src=0, group=world.group)
        yield name, whole


def shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Parameters that several modules share: (module, name there) of each place."""
    places: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module_name, name))
    return [shared for shared in places.values() if len(shared) > 1]
