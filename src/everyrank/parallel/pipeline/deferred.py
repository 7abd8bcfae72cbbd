"""Deferred weight gradients: backward computes input gradients at once and queues weight gradients.

Backward of a linear layer has two products: the gradient of its input, for which the previous stage waits, and that of
its weight. A zero-bubble pipeline computes the second when the rank would be idle (Qi et al. 2024).
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["WeightGradQueue"]


class WeightGradQueue:
    """Queue of weight gradients by (stage, micro-batch); unused without `is_used`."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.waiting: dict[tuple[int, int], list[Callable[[], None]]] = collections.defaultdict(list)
        self.current: list[Callable[[], None]] = []

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a micro-batch, whose backward queues its weight gradients."""
        return _DeferWeightGrads(self.current) if self.is_used else contextlib.nullcontext()

    def select(self, stage: int, index: int) -> None:
        """Select the micro-batch and stage of the following forward passes."""
        if self.is_used:
            self.current = self.waiting[stage, index]

    def compute(self, stage: int, index: int) -> None:
        """Compute the weight gradients of a micro-batch in a stage."""
        gradients = self.waiting.pop((stage, index))
        for add in gradients:
            add()
        # an input has its graph, whose nodes have this list: a cycle through C++, which Python never frees
        gradients.clear()


class _DeferWeightGrads(TorchFunctionMode):
    """While entered, weight gradients of linear layers are queued in `waiting` in backward."""

    def __init__(self, waiting: list[Callable[[], None]]) -> None:
        super().__init__()
        self.waiting = waiting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            values, weight, bias = _linear_args(*args, **(kwargs or {}))
            # a DTensor has its own product; a fake tensor, which plan traces, is deferred as a plain one
            is_plain = isinstance(weight, nn.Parameter) and not is_traceable_wrapper_subclass(weight)
            if is_plain and weight.requires_grad:
                return _Linear.apply(values, weight, bias, self.waiting)
        return func(*args, **(kwargs or {}))


def _linear_args(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: A002
    return input, weight, bias


class _Linear(torch.autograd.Function):
    """values (..., I), weight (O, I), bias (O,) -> (..., O); backward queues the weight gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, waiting: list[Any]) -> Tensor:
        kind = values.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        cast_values = values.to(dtype)
        ctx.save_for_backward(cast_values)
        # not save_for_backward: with recomputation, saved tensors return as copies without gradients
        ctx.weight = weight
        ctx.waiting, ctx.dtype, ctx.bias_dtype = waiting, dtype, None if bias is None else bias.dtype
        ctx.values_dtype = values.dtype
        return F.linear(cast_values, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad: Tensor = grads[0]
        (values,) = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])

        def add() -> None:
            gradient = (rows.t() @ values.reshape(-1, values.shape[-1])).to(weight.dtype)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        ctx.waiting.append(add)
        to_values = (grad @ weight.to(ctx.dtype)).to(ctx.values_dtype) if ctx.needs_input_grad[0] else None
        return to_values, None, rows.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None, None
