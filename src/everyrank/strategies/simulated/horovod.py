"""Simulation of horovod with fp16 compression: replicas whose rounded gradients are added up in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.layout.options import HorovodOptions
from everyrank.strategies import Prepared
from everyrank.strategies.simulated import replicas
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["simulate"]


def simulate(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Simulate the two ranks of `layout.simulated` in one process.

    Raises `CannotRunError` for more ranks. Then each chunk of a buffer has its own order of additions, and the content
    of a buffer depends on timing.
    """
    compress = layout.read(HorovodOptions).compress
    if compress != "none" and layout.simulated > 2:
        raise CannotRunError(
            f"layout {layout}: Horovod adds the fp16 gradients of {layout.simulated} ranks in a different order each "
            "time, so no simulation is equal to it; use 2 ranks to compare"
        )
    return replicas.simulate(workload, layout, world, _make_sum)


def _make_sum(_: nn.Module, layout: Layout) -> tuple[Callable[[nn.Parameter, list[Tensor]], Tensor], Any]:
    is_rounded = layout.options.get("compress") == "fp16"

    def combine(_: nn.Parameter, gradients: list[Tensor]) -> Tensor:
        if not is_rounded:
            return torch.stack(gradients).mean(0)
        total = gradients[0].half()
        for gradient in gradients[1:]:
            total = total + gradient.half()
        return total.to(gradients[0].dtype) / len(gradients)

    return combine, lambda: None
