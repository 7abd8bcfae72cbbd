"""DataParallel: one process, several devices; the model is copied to all of them in every step.

Holds     parameters, gradients and optimizer state in full on the first device; copies of the parameters on the others
Travels   inside the process, per micro-batch: parameters and inputs to every device, outputs and gradients back
Use when  hardly ever: torch itself advises ddp, which copies nothing and does not share one interpreter
Exact     yes; models with batch norm are refused, because each device would normalise its own part
Source    torch.nn.DataParallel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.build import autocast, build, call
from everyrank.parallel.mesh import open_mesh
from everyrank.strategies import Prepared
from everyrank.strategies._update import (
    backward,
    begin,
    full_state,
    loss_of,
    make_optimizer,
    make_scale,
    passes,
    update,
)
from everyrank.workload import Workload
from everyrank.world import World, alone

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Copy the model to as many devices as there are ranks, or to all where this is the only one.

    Raises `CannotRunError` without two CUDA devices, and for a model with batch norm.
    """
    num_cuda = torch.cuda.device_count()
    num_devices = min(world.local_size, num_cuda) if world.local_size > 1 else num_cuda
    if world.device.type != "cuda" or num_devices < 2:
        raise CannotRunError("needs 2 CUDA devices")
    world = alone(world)
    mesh = open_mesh(layout, world)
    model = build(workload, layout, mesh).model
    if has_batch_norm(model):
        raise CannotRunError("each device would normalise its own part of a batch; ddp has batch norm over all ranks")
    devices = list(range(num_devices))
    parallel = nn.DataParallel(_Called(model), device_ids=devices, output_device=devices[0])
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())

    def step(batches: Sequence[Batch]) -> Tensor:
        begin(parameters)
        shares: list[Tensor] = []
        for _, batch in passes(batches):
            with autocast(layout, world):
                loss, share = loss_of(workload, parallel(batch.input), batch, mesh)
            backward(workload, scale, loss)
            shares.append(share)
        total = sum(shares[1:], shares[0])
        update(workload, total, parameters, optimizer, schedule, scale)
        return total

    def predict(batch: Batch) -> Any:
        with autocast(layout, world):
            return parallel(batch.input)

    return Prepared(
        mesh=mesh,
        step=step,
        predict=predict,
        state=lambda: full_state(model, rank=0),
        replicas=[],
        micro_batches=layout.accumulate,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
    )


class _Called(nn.Module):
    """A model that takes its input whole, so that DataParallel can cut tensors, tuples and dicts alike."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: object) -> object:
        return call(self.model, value)
