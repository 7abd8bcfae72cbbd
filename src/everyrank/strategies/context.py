"""Context parallel: every rank holds the whole model and a part of each sequence; attention reaches over all of them.

    sequence   │ 0 │ 1 │ 2 │ 3 │        2 ranks, 4 chunks: a head and a tail each, so that a causal mask
    rank         0   1   1   0          leaves all ranks the same work

Holds     parameters, gradients and optimizer state in full; of activations the part of its positions
Travels   per micro-batch and attention, with N ranks: forward N-1 times keys and values to the next rank, backward N-1
          times keys and values and N times their gradients (method=ring); or four all-to-alls forward and four
          backward (method=ulysses: query, key, value, output). Per update one all-reduce of the gradients, in buckets,
          overlapped with backward; the count of loss terms rides in it as two more elements
Use when  sequences are too long for one device: activations, not parameters, are what does not fit
Exact     yes, where positions are a part of the input and only attention looks from one position at another
Source    Liu, Zaharia and Abbeel 2023 (ring); Jacobs et al. 2023 (Ulysses); Brandon et al. 2023 (head and tail)

Keys: method=ring or ulysses (then the heads have to divide by the ranks). `Workload.sequence_dim` says which dimension
of the input is the sequence.
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
    """Replicate the model on every rank of the world, and give each a part of every sequence."""
    mesh = open_mesh(layout, world)
    built = build(workload, layout, mesh, is_sent_round=False)  # DistributedDataParallel does that
    model = built.model
    # To the gradients it makes no difference whether ranks have other samples or other positions of the same ones.
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
            with built.passing(batch) as part, contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(layout, world):
                    output, carrier = ddp(part.input)
                    loss, share = loss_of(workload, output, part)
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
