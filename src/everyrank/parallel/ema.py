"""Exponential moving average (EMA) of the weights: each rank averages the parameters it holds.

After each update average = decay * average + (1 - decay) * weight. This is elementwise, so the average of a shard is
the shard of the average. It needs no communication under any layout, and as much memory as the weights.

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
    """The average of a model's parameters, initialised with their current values. Buffers are not averaged.

    names     names of the parameters in the model; `tensors` are their averages, with the same layout
    """

    def __init__(self, decay: float, model: nn.Module) -> None:
        self.decay = decay
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.tensors: list[Tensor] = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after an optimizer step; integers stay as they are."""
        pairs = zip(local_tensors(self.tensors), local_tensors(self.parameters), strict=True)
        pairs = [(average, weight) for average, weight in pairs if average.is_floating_point()]
        averages, weights = [average for average, _ in pairs], [weight for _, weight in pairs]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)  # pyright: ignore[reportPrivateUsage]  (documented)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the averages to the current parameters."""
        for average, weight in zip(local_tensors(self.tensors), local_tensors(self.parameters), strict=True):
            average.copy_(weight)

    @contextlib.contextmanager
    def averaged_weights(self) -> Generator[None]:
        """Swap the averages into the model for the duration of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(local_tensors(self.tensors), local_tensors(self.parameters), strict=True):
            before = average.clone()
            average.copy_(weight)
            weight.copy_(before)
