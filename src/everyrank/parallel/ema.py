"""A moving average of the weights (EMA): each rank averages what it holds.

After each update average = decay * average + (1 - decay) * weight. That is done element by element, so the average of a
shard is the shard of the average: nothing travels, under any layout, and the average costs what the weights cost.

Source: Polyak and Juditsky 1992
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor, nn

from everyrank.parallel.mesh import local_tensors

__all__ = ["WeightEMA"]


class WeightEMA:
    """The average of a model's parameters, which begins with what they are now. Buffers are not averaged.

    names     of the parameters in the model
    tensors   their averages, laid out as they are
    """

    def __init__(self, decay: float, model: nn.Module) -> None:
        self.decay = decay
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.tensors: list[Tensor] = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Follow the parameters after an update."""
        own, weights = local_tensors(self.tensors), local_tensors(self.parameters)
        torch._foreach_lerp_(own, weights, 1 - self.decay)  # pyright: ignore[reportPrivateUsage]  (documented)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from what the parameters are now."""
        for own, weight in zip(local_tensors(self.tensors), local_tensors(self.parameters), strict=True):
            own.copy_(weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Generator[None]:
        """While the model has the averages for its parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for own, weight in zip(local_tensors(self.tensors), local_tensors(self.parameters), strict=True):
            before = own.clone()
            own.copy_(weight)
            weight.copy_(before)
