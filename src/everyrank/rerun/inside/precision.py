"""Runs a script in float64: rounding is then too small to hide a mistake."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.utils.data._utils import collate

__all__ = ["install_float64"]


def install_float64() -> None:
    """Make float64 the default, the meaning of `torch.float32`, and the type of float32 data that comes in."""
    narrow = torch.float32
    for table in ("_dtype_to_storage_type_map", "_storage_type_to_dtype_map"):
        with contextlib.suppress(AttributeError):
            getattr(torch.storage, table)()  # cached now, because it would be wrong once float32 means float64

    def widened(value: Any) -> Any:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype is narrow
        return value.double() if is_narrow else value

    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.FloatTensor = torch.DoubleTensor
    torch.Tensor.float = torch.Tensor.double
    torch.nn.Module.float = torch.nn.Module.double
    for owner, name in ((torch.Tensor, "to"), (torch, "from_numpy"), (torch, "as_tensor"), (torch, "tensor")):
        original = getattr(owner, name)

        def wide(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return widened(_original(*args, **kwargs))

        setattr(owner, name, functools.wraps(original)(wide))
    collate_tensors: Any = collate.collate_tensor_fn

    def wide_batch(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return widened(collate_tensors(batch, collate_fn_map=collate_fn_map))

    collate.default_collate_fn_map[torch.Tensor] = wide_batch
