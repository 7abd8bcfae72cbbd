"""Tensor parallel: every rank holds a part of each matrix, and all ranks compute on the same samples.

             rank 0                     rank 1
    x ──► up[:half] ──► gelu       up[half:] ──► gelu ◄── x        colwise: a part of the features, nothing travels
               │                        │
          down[:, :half]           down[:, half:]                  rowwise: a part of the sum
               └────── all-reduce ──────┘ ──► y                    what every rank goes on with

Holds     a part of each matrix in the plan, its gradient and its optimizer state; all else in full
Travels   per micro-batch: forward an all-reduce of the output of each rowwise and vocabulary layer, backward one of the
          gradient of the input of each gather module and of each colwise, colwise_gather or colwise_loss layer outside
          of those; for colwise_gather an all-gather of the output, for colwise_loss three all-reduces of one number for
          each position; all before the next layer can go on. Per update: an all-reduce of the gradient of each
          parameter of replicate_sum; with clip_norm, one of the sum of squares. In the first update an all-gather of
          one number for each parameter that is not split; before it the whole model is put together once, and compared
Use when  one layer is too much for one device, or the batch cannot grow, inside a host with fast links
Exact     yes
Source    Shoeybi et al. 2019; Korthikanti et al. 2022 (sequence)

Keys: sequence=true splits the activations between the matrices along the sequence: instead of their all-reduces, a
reduce-scatter behind each split layer and an all-gather before the next, and the other way round in backward; per
update (under fsdp per micro-batch) an all-reduce of the gradient of each norm that the plan calls sequence.
What is split how is `Workload.tensor_plan`, in the words of parallel/tensor.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.build import autocast, build, call
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.norm import counted, sum_squares
from everyrank.parallel.rehearsal import rehearse
from everyrank.parallel.state import gathered_state
from everyrank.parallel.tensor import is_split
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
    """Split the matrices of the model over every rank of the world."""
    mesh = open_mesh(layout, world)
    built = build(workload, layout, mesh)
    model = built.model
    # Splitting replaced parameters, so the optimizer is built after it.
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    squares = functools.partial(sum_squares, counted(parameters, mesh), mesh)

    def step(batches: Sequence[Batch]) -> Tensor:
        built.once(lambda: rehearse(workload, layout, built, batches[0]))
        begin(parameters)
        shares: list[Tensor] = []
        for _, batch in passes(batches):
            with built.passing(batch):
                with autocast(layout, world):
                    loss, share = loss_of(workload, call(model, batch.input), batch, mesh)
                backward(workload, scale, loss)
            shares.append(share)
        built.finish()
        # Every rank has computed the loss of all samples: the count need not travel.
        total = sum(shares[1:], shares[0])
        update(workload, total, parameters, optimizer, schedule, scale, squares=squares)
        return built.share(total)

    def predict(batch: Batch) -> Any:
        with built.passing(batch), autocast(layout, world):
            return built.whole(call(model, batch.input))

    return Prepared(
        mesh=mesh,
        step=step,
        predict=predict,
        state=lambda: gathered_state(model, mesh),
        replicas=[tensor for tensor in [*parameters, *model.buffers()] if not is_split(tensor)],
        micro_batches=layout.accumulate,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
    )
