"""Memory of a device that is pretended: tensors that say they are CUDA's, whose numbers lie in the host's memory.

Nothing can be computed with them, but they can be copied to the host, which is what saving does. As on a device, what
was asked for without blocking is there only when somebody has waited for that device. Until then the host has something
else in its place.
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

__all__ = ["OnCard", "moved_to_card", "pretended_cards"]

_ATEN = torch.ops.aten
_UNTIL_THEN = 77  # what the host reads before the copy is there
_VIEWS = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.view.default, _ATEN.slice.Tensor, _ATEN.as_strided.default)
_pending: list[tuple[torch.device, Tensor, Tensor]] = []  # (device, host, memory) of copies not waited for
_waits: list[str] = []  # where the host has waited


class OnCard(Tensor):
    """A tensor in the memory of a pretended device."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor, index: int = 0) -> OnCard:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=torch.device("cuda", index)
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _VIEWS:
            return OnCard(func(args[0].memory, *args[1:], **kwargs), args[0].device.index)
        if func is _ATEN._to_copy.default and torch.device(kwargs["device"]).type == "cpu":
            host = torch.empty_like(args[0].memory)
            _to_host(host, args[0], bool(kwargs.get("non_blocking")))
            return host
        if func is _ATEN.copy_.default and not isinstance(args[0], OnCard):
            _to_host(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
            return args[0]
        raise AssertionError(f"{func} of tensors on a device: saving needs none")


def _to_host(host: Tensor, source: OnCard, is_late: bool) -> None:
    if is_late:
        host.fill_(_UNTIL_THEN)
        _pending.append((source.device, host, source.memory))
    else:
        _waits.append("copy")
        host.copy_(source.memory)


def _synchronize(device: Any = None) -> None:
    _waits.append("synchronize")
    waited = torch.device("cuda", 0) if device is None else torch.device(device)
    for entry in [entry for entry in _pending if entry[0] == waited]:
        entry[1].copy_(entry[2])
        _pending.remove(entry)


@contextlib.contextmanager
def pretended_cards() -> Iterator[list[str]]:
    """torch.cuda waits for the copies of pretended devices; gives what the host has waited for: a copy, a device.

    What nobody has waited for is forgotten at the end.
    """
    _waits.clear()
    try:
        with mock.patch.object(torch.cuda, "synchronize", _synchronize):
            yield _waits
    finally:
        _pending.clear()


def moved_to_card(tensor: Tensor, index: int = 0) -> Tensor:
    """The same numbers, in the same memory, as a tensor on a device; a part of a mesh as a part of one on devices."""
    if not isinstance(tensor, DTensor):
        return OnCard(tensor.detach(), index)
    local = OnCard(tensor.to_local().detach(), index)
    mesh = _twin_on_cards(tensor.device_mesh)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@functools.cache
def _twin_on_cards(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cuda", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
