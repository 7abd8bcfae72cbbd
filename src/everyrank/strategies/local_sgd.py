"""Local SGD: every rank trains a replica independently, and all replicas are averaged every few updates.

Memory         parameters, gradients and optimizer state in full on every rank
Communication  every `every` updates one all-reduce of trained parameters, floating-point buffers, the optimizer's state
               and the number of loss terms, and a broadcast of each integer buffer; in between nothing. For an
               evaluation in between, the average of parameters and buffers
Use when       the network is so slow that an all-reduce in every update costs more time than it saves
Exact          no: with every=H each rank takes H steps on its own samples between two averages. It is compared with a
               simulation of the same steps in one process. With every=1 (parameter averaging) and SGD it is equivalent
               to one device: the mean of the steps is the step along the mean gradient
Source         Stich, ICLR 2019; McMahan et al., AISTATS 2017

Keys: every, 1 if left out. A rank normalises its loss by its own terms, clips its own gradient, and batch norm takes
statistics over its own samples; in the average, a replica is weighted by its number of terms. Checkpoints are
saved when replicas are equal: at the first average after one is due.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from everyrank.data import Batch
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import LocalSGDOptions
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.local_sgd import Averaging
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import Trainable, make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import forward_backward, make_predict
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["check_trains_alone", "local_update", "prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Replicate the model on every rank of the world."""
    check_trains_alone(workload, layout, world.size)
    mesh = dataclasses.replace(open_mesh(layout, world), in_lockstep=False)
    parallel = parallelize(workload, layout, mesh, local_statistics=True)
    model = parallel.model
    trainable = make_trainable(workload, layout, model)
    averaging = Averaging(model, trainable.optimizer, layout.read(LocalSGDOptions).every, world)
    trainable.on_restore.append(averaging.reset_counts)

    def step(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        local = forward_backward(parallel, trainable, batches)
        # a loss that is NaN on some ranks only is not applied; the loop reports it on every rank, and so also on those
        # that already wait in the next average
        if world.size == 1 or local.is_cuda or bool(local.isfinite().all()):
            local_update(trainable, local, batches)
        else:
            trainable.skip_update()
        averaging.after_update(local[1])
        return local

    def full_state() -> dict[str, Tensor]:
        with averaging.averaged_weights():
            return replicated_state_dict(model, world.rank)

    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=full_state,
        replicated_tensors=[*trainable.parameters, *model.buffers()],
        num_micro_batches=layout.accumulate,
        averaging=averaging,
    )


def local_update(trainable: Trainable, local: Tensor, batches: Sequence[Batch]) -> None:
    """Make the step of one replica along the gradient of its local mean loss; none without loss terms.

    `local` is [sum, count] of its micro-batches, shape (2,).
    """
    # on CUDA reading the count would synchronise; there the gradient without terms is zero, and the optimizer steps
    has_terms = any(batch.size for batch in batches) if local.is_cuda else float(local[1]) > 0
    if has_terms:
        trainable.optimizer_step(local)
    else:
        trainable.skip_update()


def check_trains_alone(workload: Workload, layout: Layout, ranks: int) -> None:
    """Raise `UnsupportedLayoutError` for a workload that replicas cannot train independently."""
    if workload.ema_decay is not None:
        raise UnsupportedLayoutError(
            f"layout {layout}: ema_decay={workload.ema_decay:g}: each replica would have its own averages; use ddp"
        )
    if workload.global_batch < ranks:
        raise UnsupportedLayoutError(
            f"layout {layout}: a global batch of {workload.global_batch} leaves some of {ranks} ranks without a sample "
            "to train on; use fewer processes, or ddp"
        )
