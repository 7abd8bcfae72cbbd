"""The memory of a simulated GPU: tensors whose device is CUDA and whose values are in host memory.

You cannot compute with these tensors. You can copy them to the host, and saving needs only that. As on a GPU, a
non-blocking copy is complete only after the host has synchronized with the device. Until then, the host tensor has a
placeholder value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["SimulatedGPUTensor", "simulated_gpus", "to_simulated_gpu"]

_ATEN = torch.ops.aten
_PLACEHOLDER = 77  # the value of a host tensor until its copy is complete
_VIEWS = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.view.default, _ATEN.slice.Tensor, _ATEN.as_strided.default)
_incomplete_copies: list[tuple[torch.device, Tensor, Tensor]] = []  # (device, host tensor, device memory)
_waits: list[str] = []  # the operations for which the host has waited


class SimulatedGPUTensor(Tensor):
    """A tensor in the memory of a simulated GPU."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor, index: int = 0) -> SimulatedGPUTensor:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=torch.device("cuda", index)
        )
        tensor.memory = memory
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _VIEWS:
            return SimulatedGPUTensor(func(args[0].memory, *args[1:], **kwargs), args[0].device.index)
        if func is _ATEN._to_copy.default and torch.device(kwargs["device"]).type == "cpu":
            host_tensor = torch.empty_like(args[0].memory)
            _copy_to_host(host_tensor, args[0], bool(kwargs.get("non_blocking")))
            return host_tensor
        if func is _ATEN.copy_.default and not isinstance(args[0], SimulatedGPUTensor):
            _copy_to_host(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
            return args[0]
        raise AssertionError(f"{func} on a tensor of a simulated GPU: saving must not need it")


def _copy_to_host(host_tensor: Tensor, source: SimulatedGPUTensor, non_blocking: bool) -> None:
    """Copy a tensor at once, or with `non_blocking` at the next synchronization with its device."""
    if non_blocking:
        host_tensor.fill_(_PLACEHOLDER)
        _incomplete_copies.append((source.device, host_tensor, source.memory))
    else:
        _waits.append("copy")
        host_tensor.copy_(source.memory)


def _synchronize(device: Any = None) -> None:
    """Complete the non-blocking copies from a device, as `torch.cuda.synchronize` does."""
    _waits.append("synchronize")
    synchronized_device = torch.device("cuda", 0) if device is None else torch.device(device)
    for entry in [entry for entry in _incomplete_copies if entry[0] == synchronized_device]:
        _, host_tensor, memory = entry
        host_tensor.copy_(memory)
        _incomplete_copies.remove(entry)


@contextlib.contextmanager
def simulated_gpus() -> Iterator[list[str]]:
    """Patch `torch.cuda.synchronize` for simulated GPUs. Yield the list of waits of the host, which grows.

    A wait is "copy" for a blocking copy, or "synchronize". Copies that are incomplete at the end are dropped.
    """
    _waits.clear()
    try:
        with mock.patch.object(torch.cuda, "synchronize", _synchronize):
            yield _waits
    finally:
        _incomplete_copies.clear()


def to_simulated_gpu(tensor: Tensor, index: int = 0) -> Tensor:
    """Return a tensor on simulated GPU `index` that shares the memory of `tensor`.

    The mesh of a DTensor becomes a mesh of CUDA devices.
    """
    if not isinstance(tensor, DTensor):
        return SimulatedGPUTensor(tensor.detach(), index)
    local_tensor = SimulatedGPUTensor(tensor.to_local().detach(), index)
    mesh = _cuda_mesh(tensor.device_mesh)
    return DTensor.from_local(
        local_tensor, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@functools.cache
def _cuda_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of CUDA devices with the same ranks."""
    return DeviceMesh("cuda", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
