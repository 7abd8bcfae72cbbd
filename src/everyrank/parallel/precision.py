"""Precision: the dtype of parameters, what autocast computes in, and loss scaling for fp16. The one table of dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everyrank.layout import Layout
from everyrank.world import World

__all__ = ["DTYPES", "LossScaler", "autocast", "make_loss_scaler", "mixed_dtype", "param_dtype"]

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precision of a layout -> the dtype in which it computes."""


def mixed_dtype(layout: Layout) -> torch.dtype | None:
    """The low dtype in which matrix products run while parameters stay float32; None for a single precision."""
    return DTYPES[layout.precision] if layout.precision in ("bf16", "fp16") else None


def param_dtype(layout: Layout) -> torch.dtype:
    """The dtype of parameters and inputs: float64 or float32."""
    return torch.float32 if mixed_dtype(layout) else DTYPES[layout.precision]


def autocast(layout: Layout, world: World) -> contextlib.AbstractContextManager[Any]:
    """The context in which the forward pass and the loss run."""
    dtype = mixed_dtype(layout)
    return torch.autocast(world.device.type, dtype=dtype) if dtype else contextlib.nullcontext()


@dataclass
class LossScaler:
    """Loss scaling for fp16: gradients too small for fp16 are scaled up, and updates that overflow are skipped.

    One scale for all ranks, moved by the global norm: each rank's own scaler could skip where another steps.
    A skipped update still advances the schedule: the learning rate stays a function of the step alone.

    Source: Micikevicius et al. 2018.
    """

    scale: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, finite: bool) -> None:
        """Grow after many good steps, halve after an overflow."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


def make_loss_scaler(layout: Layout) -> LossScaler | None:
    """The loss scaler of a layout; None for the precisions that need none."""
    return LossScaler() if layout.precision == "fp16" else None
