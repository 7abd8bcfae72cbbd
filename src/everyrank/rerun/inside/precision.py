"""Runs a script in float64, so that rounding is too small to hide a mistake."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.utils.data._utils import collate

__all__ = ["install_float64"]


def install_float64() -> None:
    """Make float64 the default dtype, let `torch.float32` mean it, and convert float32 data to it."""
    float32 = torch.float32
    for table in ("_dtype_to_storage_type_map", "_storage_type_to_dtype_map"):
        with contextlib.suppress(AttributeError):
            getattr(torch.storage, table)()  # fill its cache now; later it would be wrong, as float32 means float64

    def to_double(value: Any) -> Any:
        is_float32 = isinstance(value, torch.Tensor) and value.dtype is float32
        return value.double() if is_float32 else value

    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.FloatTensor = torch.DoubleTensor
    torch.Tensor.float = torch.Tensor.double
    torch.nn.Module.float = torch.nn.Module.double
    for namespace, name in ((torch.Tensor, "to"), (torch, "from_numpy"), (torch, "as_tensor"), (torch, "tensor")):
        original = getattr(namespace, name)

        def in_double(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return to_double(_original(*args, **kwargs))

        setattr(namespace, name, functools.wraps(original)(in_double))
    collate_tensors: Any = collate.collate_tensor_fn

    def collate_in_double(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return to_double(collate_tensors(batch, collate_fn_map=collate_fn_map))

    collate.default_collate_fn_map[torch.Tensor] = collate_in_double
