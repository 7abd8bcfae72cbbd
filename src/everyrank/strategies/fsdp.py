"""Fully sharded data parallel (FSDP2): every rank holds a part of everything, and gathers what it computes with.

Holds     a part of each parameter, its gradient and its optimizer state
Travels   per micro-batch: an all-gather of each block's parameters in forward and again in backward, an all-gather
          of the rest in forward, a reduce-scatter of each block's gradients and of the rest's; per update: with
          replicas an all-reduce over them of what each of these leaves, one all-reduce of loss and count of terms (two
          elements), overlapped with backward, one of each parameter without dimensions, which cannot be sharded, and
          with clip_norm one of the sum of squares
Use when  the model or its optimizer does not fit on one device
Exact     yes
Source    Rajbhandari et al., SC 2020 (P_os+g+p); Zhao et al., VLDB 2023

Keys: reshard_after_forward=false keeps gathered blocks until backward: more memory, one all-gather less; meta=true
builds the model in full on rank 0's CPU alone, for what does not fit on every rank. With replicate=N (HSDP) shards
are kept N times: gathers stay among the shards, gradients are then all-reduced over the replicas. With tensor=N the
matrices are split before they are sharded (tensor.py), with context=N the sequences (context.py), and ranks that share
a sequence are shards, too.
Blocks are the modules at `Workload.blocks`; without it the whole model is one unit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.build import build, call, find_blocks
from everyrank.parallel.construct import materialise
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.norm import counted, sum_squares
from everyrank.parallel.rehearsal import rehearse
from everyrank.parallel.replicate import average_gradients
from everyrank.parallel.shard import reduce_over_replicas, reshard, scalar_parameters, shard
from everyrank.parallel.state import gathered_state
from everyrank.strategies import Prepared
from everyrank.strategies._update import (
    backward,
    begin,
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
    """Shard the model over every rank of the world."""
    mesh = open_mesh(layout, world)
    built = build(workload, layout, mesh)
    model = built.model
    shard(model, find_blocks(workload, model), layout, mesh)
    if layout.options.get("meta"):
        materialise(model, built.full, world)
    # Sharding replaced the parameters, so the optimizer is built after it.
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    whole = scalar_parameters(model)
    squares = functools.partial(sum_squares, counted(parameters, mesh), mesh)

    def step(batches: Sequence[Batch]) -> Tensor:
        built.once(lambda: rehearse(workload, layout, built, batches[0]))
        begin(parameters)
        own = torch.zeros(2, dtype=torch.float64, device=world.device)
        total, counting = own, None
        for is_last, batch in passes(batches):
            reduce_over_replicas(model, is_last)
            with built.passing(batch) as part:
                loss, share = loss_of(workload, call(model, part.input), part, mesh)
                own += built.share(share)
                if is_last:
                    # The count travels while the last backward computes.
                    total = own.clone()
                    counting = dist.all_reduce(total, group=world.group, async_op=True)
                backward(workload, scale, loss)
        average_gradients(whole, mesh)
        built.finish()
        assert counting is not None
        counting.wait()
        # fully_shard has averaged over all that read: over all but the ranks that split a matrix
        averaged = world.size // mesh.size("tensor")
        update(workload, total, parameters, optimizer, schedule, scale, averaged, squares)
        return own

    def predict(batch: Batch) -> Any:
        with built.passing(batch) as part:
            output = call(model, part.input)
        reshard(model)  # no backward follows that would
        return built.whole(output)

    return Prepared(
        mesh=mesh,
        step=step,
        predict=predict,
        state=lambda: gathered_state(model, mesh),
        replicas=whole,
        micro_batches=layout.accumulate,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
    )
