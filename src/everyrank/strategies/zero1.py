"""ZeRO stage 1: every rank holds the whole model and a part of the optimizer.

Memory         parameters and gradients in full on every rank; optimizer state for the parameters that the rank owns
Communication  one all-reduce of the gradients per update, in buckets, overlapped with backward; with (sum, count) of
               the loss as two more elements; then one broadcast by each rank of the trained parameters it owns
Use when       the model fits on one device but its optimizer state does not
Exact          yes; with batch_norm=local no: compared with a simulation of the same in one process
Source         Rajbhandari et al., SC 2020 (P_os)

Keys: those of ddp.
"""

from __future__ import annotations

import contextlib

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.ddp import apply_ddp, check_reduced, check_unused_parameters, global_sum_and_count
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.parallel.zero1 import assign_owners, broadcast_from_owners, keep_owned_parameters
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Replicate the model on every rank; keep only the optimizer state that this rank owns."""
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh, broadcast=False)  # DistributedDataParallel does that
    model = parallel.model
    ddp = apply_ddp(model, layout, world)
    trainable = make_trainable(workload, layout, model)
    named = dict(model.named_parameters())
    # The assignment is the same on all ranks, because they iterate over the same parameters in the same order.
    trained = [parameter for parameter in trainable.parameters if parameter.requires_grad]
    owners = assign_owners(trained, world.size)
    owned = {parameter for parameter, owner in zip(trained, owners, strict=True) if owner == world.rank}
    keep_owned_parameters(trainable.optimizer, owned)

    def around(is_last: bool, _: Batch) -> contextlib.AbstractContextManager[None]:
        # Only the last micro-batch sends gradients. no_sync has to be entered before the forward pass.
        return contextlib.nullcontext() if is_last else ddp.no_sync()

    def after_backward() -> None:
        check_unused_parameters(named, layout, world)
        check_reduced(ddp, layout)

    step = make_step(
        parallel,
        trainable,
        forward=ddp,  # returns the output and the carrier of [sum, count]
        around=around,
        after_backward=after_backward,
        sum_over_ranks=lambda _: global_sum_and_count(ddp, world),
        num_averaged=world.size,
        after_step=lambda: broadcast_from_owners(trained, owners, world),
        carrier=ddp.module.carrier,
    )
    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=lambda: replicated_state_dict(model, world.rank),
        replicated_tensors=[*trainable.parameters, *model.buffers()],
        num_micro_batches=layout.accumulate,
    )
