"""Refuse a training before its first update where parameters, gradients and optimizer state exceed the memory.

The sizes are those of tensors that exist or are sure to come, so the check costs one small collective, and is a lower
bound: activations and temporaries come on top. A model is refused while it is built, as soon as its parameters are too
many. On a CPU there is no later chance, because the kernel kills a process without an error message.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from everyrank.errors import CannotRunError
from everyrank.launch import host_memory_bytes
from everyrank.layout import Layout
from everyrank.layout.options import BuildOptions
from everyrank.parallel.mesh import local_tensors
from everyrank.parallel.trainable import Trainable
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["check_state_fits", "layouts_that_split", "optimizer_tensors", "refuse_too_large", "state_bytes"]

_TIGHT = 0.9  # share of the memory from which a warning is printed
_MOMENTS: dict[type[Optimizer], int] = {
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax), 2),
    torch.optim.Adadelta: 2,
    torch.optim.Adagrad: 1,
    torch.optim.RMSprop: 1,
}
"""Class of an optimizer -> tensors of the size of a parameter that it keeps."""


def optimizer_tensors(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many tensors of the size of each parameter of a group the optimizer keeps; 0 if unknown."""
    if type(optimizer) is torch.optim.SGD:
        return int(bool(group.get("momentum")))
    return _MOMENTS.get(type(optimizer), 0) + int(bool(group.get("amsgrad")))


def state_bytes(trainable: Trainable) -> int:
    """Return the bytes of this rank's parameters, gradients and optimizer state during an update, or fewer.

    Sparse gradients, and the state of optimizers that are not torch's own, are not counted.
    """
    sparse = {
        parameter
        for module in trainable.model.modules()
        if getattr(module, "sparse", False)
        for parameter in module.parameters(recurse=False)
    }
    trained = [p for p in trainable.parameters if p.requires_grad and p not in sparse]
    total = _bytes(trainable.parameters) + _bytes(trained)
    for group in trainable.optimizer.param_groups:
        total += optimizer_tensors(trainable.optimizer, group) * _bytes(p for p in group["params"] if p.requires_grad)
    return total


def _bytes(parameters: Any) -> int:
    """Bytes of this rank's parts; of those on the meta device none."""
    return sum(tensor.nbytes for tensor in local_tensors(list(parameters)) if tensor.device.type != "meta")


def _own_memory(world: World) -> int:
    """Bytes of this rank's GPU, or of this host."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    return host_memory_bytes()


def check_state_fits(trainable: Trainable, layout: Layout, world: World) -> None:
    """Raise `CannotRunError` on every rank where an update cannot fit on one of them. A collective.

    Rank 0 prints a warning where little is left for activations.
    """
    if world.backend == "fake":  # World.pretend
        return
    numbers = torch.tensor([state_bytes(trainable), _own_memory(world)])
    rows = [(int(row[0]), int(row[1])) for row in all_gather(numbers, world)]
    if world.device.type == "cuda":
        uses = [(needed, memory, f"rank {rank}, whose GPU has") for rank, (needed, memory) in enumerate(rows)]
    else:  # the ranks of a host share its memory
        hosts = [world.hosts[rank] if len(rows) > 1 else "" for rank in range(len(rows))]
        uses = [
            (sum(needed for (needed, _), where in zip(rows, hosts, strict=True) if where == host), memory, text)
            for (_, memory), host in zip(rows, hosts, strict=True)
            for text in [f"{hosts.count(host)} rank{'s' * (hosts.count(host) > 1)} of a host, which has"]
        ]
    needed, memory, where = max(uses, key=lambda use: use[0] / use[1])
    text = f"parameters, gradients and optimizer state take {_gib(needed)} on {where} {_gib(memory)}"
    if needed > memory:
        raise CannotRunError(f"layout {layout}: does not fit: {text}; {layouts_that_split(layout)}")
    if needed > _TIGHT * memory and world.rank == 0:
        print(f"everyrank: layout {layout} may not fit: {text}", file=sys.stderr, flush=True)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


@contextlib.contextmanager
def refuse_too_large(layout: Layout, world: World, dtype: torch.dtype) -> Generator[None]:
    """Raise `CannotRunError` in the block as soon as the modules that it builds have more parameters than memory.

    On a GPU each parameter counts in the `dtype` that it will have. On a CPU only trained parameters count, because
    others may be mapped from a file, and each rank of the host builds the same model.
    """
    if world.backend == "fake":
        yield
        return
    is_gpu = world.device.type == "cuda"
    memory = _own_memory(world) // (1 if is_gpu else world.local_size)
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    registered = 0

    def size(tensor: Tensor) -> int:
        return tensor.numel() * (dtype.itemsize if is_gpu and tensor.is_floating_point() else tensor.itemsize)

    def hook(_: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal registered
        if parameter is None or parameter.is_meta or not (is_gpu or parameter.requires_grad):
            return
        alive[id(parameter)] = parameter
        registered += size(parameter)
        if registered > memory:  # some may have been replaced, or share a storage
            registered = sum({tensor.untyped_storage().data_ptr(): size(tensor) for tensor in alive.values()}.values())
        if registered > memory:
            where = "a GPU has" if is_gpu else f"{world.local_size} ranks each build it on a host, which has"
            raise CannotRunError(
                f"layout {layout}: does not fit: the model has more than {_gib(registered)} of parameters (up to "
                f"{name}), and {where} {_gib(_own_memory(world))}; {layouts_that_split(layout)}"
            )

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def layouts_that_split(layout: Layout) -> str:
    """Return the advice for a model that does not fit."""
    if layout.read(BuildOptions).meta:
        return "give more ranks"
    return (
        "give a layout that splits the model: fsdp:meta=true, tensor:meta=true or pipeline:meta=true (verify takes one "
        "as --reference)"
    )
