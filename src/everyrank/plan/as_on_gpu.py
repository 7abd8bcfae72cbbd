"""Replaces operators that are one kernel on a GPU and several on a CPU, so that a trace on a CPU is that of a GPU.

- RMSNorm: one kernel in forward and one in backward, which keep the input and one number for each row
- optimizers: one kernel for many parameters (foreach), torch's default on a GPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["fused_norms", "take_all_at_once"]


def take_all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Set `foreach` for an optimizer with default settings, as torch does on a GPU (not for Adafactor)."""
    if isinstance(optimizer, torch.optim.Adafactor):
        return
    for group in optimizer.param_groups:
        if group.get("foreach", 0) is None and not group.get("fused"):
            group["foreach"] = True


@contextlib.contextmanager
def fused_norms() -> Generator[None]:
    """Replace `rms_norm` by one operator if a GPU would: input and weight have the same dtype."""
    original = torch.nn.functional.rms_norm

    def rms_norm(value: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        is_fused = weight is not None and weight.dtype == value.dtype
        if not is_fused or isinstance(value, DTensor) or isinstance(weight, DTensor):
            return original(value, shape, weight, eps)  # pyright: ignore[reportArgumentType]
        return _FusedNorm.apply(value, weight)  # pyright: ignore[reportReturnType]

    with mock.patch.object(torch.nn.functional, "rms_norm", rms_norm):
        yield


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        result, scale = _norm(value, weight)
        ctx.save_for_backward(value, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        value, weight, scale = ctx.saved_tensors
        return _norm_backward(gradients[0], value, weight, scale)


# only the shapes of fake tensors matter


def _empty_norm(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    del weight
    return torch.empty_like(value), value.new_empty(value.shape[:-1])


def _empty_norm_backward(gradient: Tensor, value: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    del gradient, scale
    return torch.empty_like(value), torch.empty_like(weight)


_norm = torch.library.custom_op("everyrank::rms_norm", _empty_norm, mutates_args=())
_norm_backward = torch.library.custom_op("everyrank::rms_norm_backward", _empty_norm_backward, mutates_args=())
_norm.register_fake(_empty_norm)
_norm_backward.register_fake(_empty_norm_backward)
