"""Fully sharded data parallel (FSDP2): every rank holds a shard of the model and gathers parameters when it needs them.

Memory         a part of each parameter, its gradient and its optimizer state
Communication  per micro-batch: an all-gather of each block's parameters in forward and again in backward, an all-gather
               of the rest in forward, a reduce-scatter of each block's gradients and of the rest's. Per update: with
               replicas an all-reduce over them of each gradient shard; one all-reduce of loss and count of terms (two
               elements), overlapped with backward; one of the gradient of each parameter without dimensions, which
               cannot be sharded; with clip_norm one of the sum of squares. With tensor, context or expert also their
               communication
Use when       the model or its optimizer does not fit on one device
Exact          yes; with batch_norm=local no: compared with a simulation of the same in one process
Source         Rajbhandari et al., SC 2020 (P_os+g+p); Zhao et al., VLDB 2023

Keys: reshard_after_forward=false keeps gathered blocks until backward: more memory, one all-gather less; meta=true
fills the shards from a file, for a model that fits in the memory of no rank. With replicate=N (HSDP) shards
have N copies: gathers stay among the shards, gradients are then all-reduced over the copies. With tensor=N the
matrices are split before they are sharded (strategies/tensor.py), with context=N the sequences
(parallel/context), and ranks along the context axis shard parameters, too. With expert=N each mixture's experts
are a separate unit, sharded over the ranks that hold the same ones (parallel/expert.py); the rest over all ranks.
Blocks are the modules at `Workload.blocks`; without it the whole model is one unit.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import DATA_AXES, Layout
from everyrank.parallel.check_equal import check_equal
from everyrank.parallel.fsdp import apply_fsdp, check_output, reshard_after, scalar_parameters, set_requires_all_reduce
from everyrank.parallel.full_state import full_state_dict
from everyrank.parallel.gradients import average_replicated_grads, norm_params, sum_squares
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import ParallelModel, call_model, find_called_blocks, parallelize
from everyrank.parallel.same_gradients import SameGradients
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Shard the model over every rank of the world."""
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    apply_fsdp(model, find_called_blocks(workload, layout, model), layout, mesh, parallel.experts)
    parallel.materialise()
    # Sharding replaced the parameters, so the optimizer is built after it.
    trainable = make_trainable(workload, layout, model)
    replicated = scalar_parameters(model)
    sum_grad_squares = functools.partial(sum_squares, norm_params(trainable.parameters, mesh), mesh)

    same_gradients = SameGradients(dict(model.named_parameters()), layout, world)

    def around(is_last: bool, _: Batch) -> contextlib.AbstractContextManager[None]:
        set_requires_all_reduce(model, is_last)
        # with replicas, torch keeps the gradients of earlier micro-batches to itself
        has_gradients = is_last or mesh.size("replicate") == 1
        return same_gradients.check_backward() if has_gradients else contextlib.nullcontext()

    def forward(value: Any) -> tuple[Any, None]:
        output = call_model(model, value)
        check_output(output)
        return output, None

    total = CountInFlight(parallel)
    step = make_step(
        parallel,
        trainable,
        forward=forward,
        around=around,
        has_autocast=False,  # MixedPrecisionPolicy casts instead
        before_last_backward=total.start,
        after_backward=lambda: average_replicated_grads(replicated, mesh),
        sum_over_ranks=total.wait,
        num_averaged=mesh.size(*DATA_AXES),  # ranks that split a matrix have the same loss
        sum_grad_squares=sum_grad_squares,
        before_first=lambda batch: check_equal(parallel, batch),
    )

    def predict(value: Any) -> Any:
        return reshard_after(model, call_model(model, value))  # without a backward, the root module would stay gathered

    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel, predict, has_autocast=False),
        full_state=lambda: full_state_dict(parallel),
        replicated_tensors=replicated,
        num_micro_batches=layout.accumulate,
    )


class CountInFlight:
    """Sums [sum, count] over all ranks in an all-reduce that overlaps with the last backward."""

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel, self.group = parallel, parallel.mesh.world.group

    def start(self, local: Tensor) -> None:
        """Start the all-reduce of the local [sum, count], shape (2,)."""
        self.total = self.parallel.count_once(local).clone()
        self.work = dist.all_reduce(self.total, group=self.group, async_op=True)

    def wait(self, _: Tensor) -> Tensor:
        """Return the sum over all ranks, shape (2,)."""
        assert self.work is not None
        self.work.wait()
        return self.total
