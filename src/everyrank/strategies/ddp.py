"""Distributed data parallel: every rank holds the whole model and averages gradients.

Holds     parameters, gradients and optimizer state in full on every rank
Travels   one all-reduce of the gradients per update, in buckets, overlapped with backward; the count of loss terms
          rides in it as two more elements
Use when  the model and its optimizer fit on one device
Exact     yes
Source    Li et al., VLDB 2020

Keys: bucket_mb, the size of a bucket in MiB; find_unused=true, for models that leave parameters out of some
updates; static_graph=true, for models that use the same ones in every update. With context=N the ranks that share a
sequence are replicas, too (see context.py). With tensor=N the matrices are split (see tensor.py), and torch's
`fully_shard` keeps the replicas of the parts: it is `fsdp:replicate=...,shard=1,tensor=N`, and sends what that sends.
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
from everyrank.parallel.rehearsal import rehearse
from everyrank.parallel.replicate import check_all_used, global_total, replicate
from everyrank.strategies import Prepared, fsdp
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
    """Replicate the model on every rank of the world."""
    mesh = open_mesh(layout, world)
    if mesh.size("tensor") > 1:  # replicas of split matrices: replicas of shards, with one shard
        return fsdp.prepare(workload, layout, world)
    built = build(workload, layout, mesh, is_sent_round=False)  # DistributedDataParallel does that
    model = built.model
    ddp = replicate(model, layout, world)
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    everything = list(ddp.parameters())  # with the carrier of the count
    names = dict(model.named_parameters())

    def step(batches: Sequence[Batch]) -> Tensor:
        built.once(lambda: rehearse(workload, layout, built, batches[0]))
        begin(everything)
        shares: list[Tensor] = []
        for is_last, batch in passes(batches):
            # Only the last micro-batch sends gradients. no_sync has to be entered before the forward pass.
            with built.passing(batch) as part, contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(layout, world):
                    output, carrier = ddp(part.input)
                    loss, share = loss_of(workload, output, part, mesh)
                backward(workload, scale, loss, (carrier, share.to(carrier.dtype)))
            shares.append(share)
        check_all_used(names, layout)
        update(workload, global_total(ddp, world), parameters, optimizer, schedule, scale, averaged=world.size)
        return sum(shares[1:], shares[0])

    def predict(batch: Batch) -> Any:
        with built.passing(batch) as part, autocast(layout, world):
            return built.whole(call(model, part.input))

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
