"""Horovod: data parallel with the library Horovod: its ranks, its all-reduce and an optimizer that sums gradients.

Memory         parameters, gradients and optimizer state in full on every rank
Communication  one all-reduce of each gradient per update, overlapped with backward; Horovod fuses gradients that are
               ready together. (sum, count) of the loss as two more elements. Bytes are counted as passed to Horovod
Use when       your cluster starts jobs with horovodrun; otherwise use ddp, which does the same and is maintained
Exact          yes; with batch_norm=local or compress=fp16 no: compared with a simulation of the same in one process
Source         Sergeev and Del Balso 2018

Keys: compress=fp16, to send half the bytes of float32; batch_norm=local, as under ddp, where it is synchronised over
torch's own group otherwise. Needs Horovod built for this torch (docs/horovod.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.layout.table import HorovodOptions
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.horovod import (
    HorovodSum,
    broadcast_model,
    broadcast_optimizer,
    check_every_gradient,
    distributed_optimizer,
    sum_untrained_grads,
    wait_for_gradients,
)
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import forward_backward, make_predict
from everyrank.workload import Workload
from everyrank.world import World, start_horovod

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Replicate the model on every rank; Horovod sends rank 0's weights, and sums the gradients."""
    hvd = start_horovod(world)
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh, broadcast=False)  # Horovod does that
    model, compress = parallel.model, layout.read(HorovodOptions).compress
    broadcast_model(hvd, model, world)
    trainable = make_trainable(
        workload,
        layout,
        model,
        wrap=lambda optimizer: distributed_optimizer(hvd, optimizer, model, layout.accumulate, compress),
    )
    optimizer: Any = trainable.optimizer

    def broadcast_from_rank_0() -> None:  # rank 0 may have loaded a checkpoint
        broadcast_model(hvd, model, world)
        broadcast_optimizer(hvd, optimizer, world)

    def step(batches: Sequence[Batch]) -> Tensor:
        parallel.call_once(broadcast_from_rank_0)
        trainable.zero_grad()
        totals: list[HorovodSum] = []  # (sum, count) of the loss; sent during the last backward, like the gradients
        local = forward_backward(
            parallel,
            trainable,
            batches,
            before_last_backward=lambda local: totals.append(HorovodSum(hvd, local, "sum and count", world)),
        )
        check_every_gradient(model)
        wait_for_gradients(hvd, optimizer, world)
        sum_untrained_grads(hvd, model, optimizer, world)
        with optimizer.skip_synchronize():  # the gradients are summed: normalise, clip, step
            trainable.optimizer_step(totals[0].wait())
        parallel.end_update()
        return local

    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=lambda: replicated_state_dict(model, world.rank),
        replicated_tensors=[*trainable.parameters, *model.buffers()],
        num_micro_batches=layout.accumulate,
    )
