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
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.loss import compute_loss
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import call_model, parallelize
from everyrank.parallel.precision import autocast
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World, single_process_world

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Build the model and train it here, whatever the world."""
    world = single_process_world(world)
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    trainable = make_trainable(workload, layout, model)

    def step(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        shares: list[Tensor] = []
        for _, batch in trainable.iter_micro_batches(batches):
            with parallel.micro_batch(batch):
                with autocast(layout, world):
                    loss, share = compute_loss(workload, call_model(model, batch.input), batch, mesh)
                trainable.backward(loss)
            shares.append(share)
        total = sum(shares[1:], shares[0])
        trainable.optimizer_step(total)
        return total

    def predict(batch: Batch) -> Any:
        with parallel.micro_batch(batch), autocast(layout, world):
            return call_model(model, batch.input)

    return Prepared(
        parallel,
        trainable,
        step,
        predict,
        full_state=lambda: replicated_state_dict(model, rank=0),
        replicated_tensors=[],
        num_micro_batches=layout.accumulate,
    )
