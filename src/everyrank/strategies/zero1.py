"""ZeRO stage 1: every rank holds the whole model and a part of the optimizer.

Holds     parameters and gradients in full on every rank; optimizer state for the parameters that the rank owns
Travels   one all-reduce of the gradients per update, in buckets, overlapped with backward; the count of loss terms
          rides in it as two more elements; then one broadcast by each rank of the trained parameters it owns
Use when  the model fits on one device but its optimizer state does not
Exact     yes
Source    Rajbhandari et al., SC 2020 (P_os)

Keys: those of ddp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.build import autocast, build, call
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.partition import assign_owners, broadcast_from_owners, prune
from everyrank.parallel.replicate import check_all_used, global_total, replicate
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
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Replicate the model on every rank; keep of the optimizer what this rank owns."""
    mesh = open_mesh(layout, world)
    built = build(workload, layout, mesh, is_sent_round=False)  # DistributedDataParallel does that
    model = built.model
    ddp = replicate(model, layout, world)
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    everything = list(ddp.parameters())  # with the carrier of the count
    names = dict(model.named_parameters())
    # Every rank comes to the same assignment, because all go through the same parameters in the same order.
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    owners = assign_owners(trained, world.size)
    prune(optimizer, {p for p, owner in zip(trained, owners, strict=True) if owner == world.rank})

    def step(batches: Sequence[Batch]) -> Tensor:
        begin(everything)
        shares: list[Tensor] = []
        for is_last, batch in passes(batches):
            # Only the last micro-batch sends gradients. no_sync has to be entered before the forward pass.
            with built.passing(batch), contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(layout, world):
                    output, carrier = ddp(batch.input)
                    loss, share = loss_of(workload, output, batch, mesh)
                backward(workload, scale, loss, (carrier, share.to(carrier.dtype)))
            shares.append(share)
        check_all_used(names, layout)
        update(workload, global_total(ddp, world), parameters, optimizer, schedule, scale, averaged=world.size)
        broadcast_from_owners(trained, owners, world)
        return sum(shares[1:], shares[0])

    def predict(batch: Batch) -> Any:
        with built.passing(batch), autocast(layout, world):
            return call(model, batch.input)

    return Prepared(
        mesh=mesh,
        step=step,
        predict=predict,
        state=lambda: full_state(model, world.rank),
        replicas=[*parameters, *model.buffers()],
        micro_batches=layout.accumulate,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
    )
