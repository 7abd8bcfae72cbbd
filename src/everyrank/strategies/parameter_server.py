"""Parameter server: some ranks hold the parameters; the others pull them, and push gradients.

                     ┌── pull ──► trainer 0   reads its part of the global batch, computes gradients
    server 0 .. S-1 ─┼── pull ──► trainer 1
       ▲   ▲   ▲     └── pull ──► trainer 2
       └───┴───┴──────── push ────────┘

Memory         a server: its part of the parameters (all of one precision, divided by size), their gradients and
               optimizer state; a trainer: parameters and gradients in full, no optimizer state
Communication  per update, between each trainer and each server: the server's part of the parameters one way, of the
               gradients the other, in front of these a head of 3 numbers and one flag for each parameter; back comes
               loss and count (two elements, from the first server). With clip_norm servers exchange one number each. So
               at a server the bytes grow with the trainers, at a trainer they do not. Before an evaluation, on_epoch or
               a checkpoint: one broadcast of each parameter by its server, and of buffers by the first trainer
Use when       rarely: ddp spreads the communication evenly over ranks. Asynchronous updates help if ranks differ in
               speed and stale gradients are acceptable
Exact          yes with updates=sync; no with updates=async
Source         Li et al., OSDI 2014; asynchronous: Dean et al., NIPS 2012 (Downpour SGD), Recht et al., NIPS 2011
               (Hogwild)

Keys: servers=S, the first S ranks (1); updates=sync or async; order=arrival or seeded (of async).

Synchronous: a server adds up the gradients of all trainers in the order of ranks, divides them by the number of loss
terms that came with them, and makes one update.

Asynchronous: no trainer waits for another. Each trainer's part of the global batch makes a separate update. The trainer
computes the mean gradient over the terms of its part, clips it, and pushes it; the server applies it, even if
parameters have changed since this trainer pulled. One update of the loop has as many of these as there are trainers
with samples. The learning-rate schedule counts updates of the loop, and each part gets the whole learning rate. A
trainer may run ahead of the others until the loop next sums the losses (after ten updates at most). With order=seeded
the server takes its trainers in an order drawn from the seed, pulls and pushes mixed, so that the training can be
repeated. Batch norm is not supported: statistics over all trainers would make them wait.

If a rank dies, the launcher ends the training and names the rank, with both kinds of updates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from torch import Tensor

from everyrank.data import Batch
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import ParameterServerOptions
from everyrank.parallel.batch_gather import raise_on_all_ranks
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.server.asynchronous import async_server, async_trainer, refuse_batch_norm
from everyrank.parallel.server.link import ServerLink, divide
from everyrank.parallel.server.synchronous import sync_server, sync_trainer
from everyrank.parallel.trainable import make_trainable
from everyrank.parallel.zero1 import keep_owned_parameters
from everyrank.strategies import Prepared
from everyrank.strategies.step import forward_backward, make_predict
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Build the model on every rank; keep the optimizer state that this rank holds as a server, none on a trainer."""
    options = layout.read(ParameterServerOptions)
    mesh = dataclasses.replace(open_mesh(layout, world), in_lockstep=options.updates == "sync")
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    if options.updates == "async":
        refuse_batch_norm(layout, model)
    trainable = make_trainable(workload, layout, model)
    link = ServerLink(mesh, divide(trainable.parameters, layout))
    keep_owned_parameters(trainable.optimizer, set(link.server_parameters) if mesh.is_server else set())
    deferred_errors: list[UnsupportedLayoutError] = []  # only on trainers
    compute = functools.partial(forward_backward, parallel, trainable, deferred_errors=deferred_errors)
    if options.updates == "sync":
        update = sync_server(trainable, link) if mesh.is_server else sync_trainer(trainable, link, compute)
    elif mesh.is_server:
        update = async_server(trainable, link, workload.seed if options.order == "seeded" else None)
    else:
        update = async_trainer(trainable, link, compute)

    def step(batches: Sequence[Batch]) -> Tensor:
        is_first = parallel.call_once(lambda: None)
        share = update(batches)
        raise_on_all_ranks(deferred_errors, world, is_first)
        return share

    def gather_for_eval() -> None:
        link.gather_for_eval(model, trainable.ema)

    def full_state() -> dict[str, Tensor]:
        gather_for_eval()
        return replicated_state_dict(model, world.rank)

    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state,
        replicated_tensors=[*trainable.parameters, *model.buffers()],
        num_micro_batches=layout.accumulate,
        gather_for_eval=gather_for_eval,
    )
