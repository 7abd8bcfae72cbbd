"""Weight gradients that wait: backward computes what the stage before is waiting for, and notes the rest.

Backward through a linear layer is two products: one gives the gradient of its input, the other that of its weight. A
pipeline with zero bubbles does the second when it has nothing else to do (Qi et al. 2024).
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

__all__ = ["WeightGradQueue"]


class WeightGradQueue:
    """The weight gradients that wait, by (stage, micro-batch). Without `is_used` none does."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.waiting: dict[tuple[int, int], list[Callable[[], None]]] = collections.defaultdict(list)
        self.current: list[Callable[[], None]] = []

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around each micro-batch: what its backward comes to is put into the queue."""
        return _DeferWeightGrads(self.current) if self.is_used else contextlib.nullcontext()

    def select(self, stage: int, index: int) -> None:
        """What goes through the model from now on is this micro-batch in this stage."""
        if self.is_used:
            self.current = self.waiting[stage, index]

    def compute(self, stage: int, index: int) -> None:
        """Compute the weight gradients of a micro-batch in a stage."""
        for add in self.waiting.pop((stage, index)):
            add()


class _DeferWeightGrads(TorchFunctionMode):
    """While it is entered, the weight gradients of linear layers are noted in `waiting` when backward comes to them."""

    def __init__(self, waiting: list[Callable[[], None]]) -> None:
        super().__init__()
        self.waiting = waiting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            values, weight, bias = _arguments(*args, **(kwargs or {}))
            if type(weight) is nn.Parameter and weight.requires_grad:
                return _Linear.apply(values, weight, bias, self.waiting)
        return func(*args, **(kwargs or {}))


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: A002
    return input, weight, bias


class _Linear(torch.autograd.Function):
    """values (..., I), weight (O, I), bias (O,) -> (..., O); backward leaves the weight's gradient to the queue."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, waiting: list[Any]) -> Tensor:
        kind = values.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        low_values = values.to(low)
        ctx.save_for_backward(low_values)
        ctx.weight = weight  # itself: where blocks run again, what is saved comes back as a copy without a gradient
        ctx.waiting, ctx.low, ctx.bias = waiting, low, None if bias is None else bias.dtype
        ctx.into = values.dtype
        return F.linear(low_values, weight.to(low), None if bias is None else bias.to(low))

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
        to_values = (grad @ weight.to(ctx.low)).to(ctx.into) if ctx.needs_input_grad[0] else None
        return to_values, None, rows.sum(0).to(ctx.bias) if ctx.bias is not None else None, None
