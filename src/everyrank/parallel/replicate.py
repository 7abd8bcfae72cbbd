"""Every rank holds the whole model; DistributedDataParallel averages the gradients while backward still runs.

The number of loss terms travels with them. Ranks normalise by the global count, which none of them knows alone; a
blocking all-reduce of it would hold up every step, so it rides in DDP's own bucket, as the gradient of a
parameter of two zeros: the gradient of (zeros * [sum, count]).sum() is [sum, count].
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everyrank.errors import WorkloadError
from everyrank.layout import Layout
from everyrank.parallel.build import call, compute_dtype
from everyrank.parallel.mesh import Mesh
from everyrank.world import World

__all__ = ["average_gradients", "check_all_used", "global_total", "replicate"]


# the name since torch 2.13, which warns of the old one
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}


class Counted(nn.Module):
    """A model with the two-element parameter that carries (sum, count) to all ranks."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.carrier = nn.Parameter(torch.zeros(2, device=device, dtype=dtype))

    def forward(self, value: Any) -> tuple[Any, Tensor]:
        """The model's output, and the carrier: DDP looks for unused parameters among what the outputs need."""
        return call(self.model, value), self.carrier * 1.0


def replicate(model: nn.Module, layout: Layout, world: World) -> DistributedDataParallel:
    """The model under DDP; called with an input, it returns (output, carrier)."""
    bucket_mb = layout.options.get("bucket_mb")
    return DistributedDataParallel(
        Counted(model, world.device, compute_dtype(layout)),
        process_group=world.group,
        # synchronised batch norm leaves the same bits in every rank's buffers: nothing to send before each forward
        **_NO_BUFFER_SYNC,
        bucket_cap_mb=bucket_mb,  # type: ignore[arg-type]
        find_unused_parameters=bool(layout.options.get("find_unused", False)),
        static_graph=bool(layout.options.get("static_graph", False)),
    )


def global_total(ddp: DistributedDataParallel, world: World) -> Tensor:
    """[sum, count] over all ranks, after backward. DDP averages, so its result is scaled back by the world size."""
    carrier: Counted = ddp.module
    assert carrier.carrier.grad is not None
    return carrier.carrier.grad * world.size


def check_all_used(parameters: Mapping[str, nn.Parameter], layout: Layout) -> None:
    """Raise `WorkloadError` for parameters without a gradient, which DDP would leave unreduced without a word."""
    if layout.options.get("find_unused") or layout.options.get("static_graph"):
        return
    for name, parameter in parameters.items():
        if parameter.grad is None and parameter.requires_grad:
            raise WorkloadError(
                f"layout {layout}: parameter {name} took no part in the loss; "
                f"use --layout {layout.strategy}:find_unused=true, or freeze it"
            )


def average_gradients(parameters: list[nn.Parameter], mesh: Mesh) -> None:
    """Average what no wrapper averages: the gradients of a few parameters that every rank keeps whole."""
    axes = ("replicate", "shard", "context")
    if mesh.size(*axes) == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.group(*axes))
            parameter.grad /= mesh.size(*axes)
