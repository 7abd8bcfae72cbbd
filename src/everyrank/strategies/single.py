"""Single: one process, one device. What every other way of training is compared with.

Holds     parameters, gradients and optimizer state in full
Travels   nothing
Use when  the model fits and one device is fast enough; also to find mistakes
Exact     yes
Source    the definition: Robbins and Monro 1951
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
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
    """Build the model and train it here, whatever the world."""
    world = alone(world)
    mesh = open_mesh(layout, world)
    model = build(workload, layout, mesh).model
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())

    def step(batches: Sequence[Batch]) -> Tensor:
        begin(parameters)
        shares: list[Tensor] = []
        for _, batch in passes(batches):
            with autocast(layout, world):
                loss, share = loss_of(workload, call(model, batch.input), batch, mesh)
            backward(workload, scale, loss)
            shares.append(share)
        total = sum(shares[1:], shares[0])
        update(workload, total, parameters, optimizer, schedule, scale)
        return total

    def predict(batch: Batch) -> Any:
        with autocast(layout, world):
            return call(model, batch.input)

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
