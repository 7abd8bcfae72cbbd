"""Fully sharded data parallel (FSDP2): every rank holds a part of everything, and gathers what it computes with.

Holds     a part of each parameter, its gradient and its optimizer state
Travels   per micro-batch: an all-gather of each block's parameters in forward and again in backward, an all-gather
          of the rest in forward, a reduce-scatter of each block's gradients and of the rest's. Per update: with
          replicas an all-reduce over them of each gradient shard; one all-reduce of loss and count of terms (two
          elements), overlapped with backward; one of the gradient of each parameter without dimensions, which cannot be
          sharded; with clip_norm one of the sum of squares. With tensor, context or expert what their pages say, too
Use when  the model or its optimizer does not fit on one device
Exact     yes; with batch_norm=local no: compared with a simulation of the same in one process
Source    Rajbhandari et al., SC 2020 (P_os+g+p); Zhao et al., VLDB 2023

Keys: reshard_after_forward=false keeps gathered blocks until backward: more memory, one all-gather less; meta=true
fills the shards from a file, for a model that no rank has the memory for. With replicate=N (HSDP) shards
have N copies: gathers stay among the shards, gradients are then all-reduced over the copies. With tensor=N the
matrices are split before they are sharded (strategies/tensor.py), with context=N the sequences
(strategies/context.py), and ranks along the context axis shard parameters, too. With expert=N each mixture's experts
are a unit of their own, sharded over the ranks that hold the same ones (strategies/expert.py); all else over all ranks.
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
from everyrank.layout import DATA_AXES, Layout
from everyrank.parallel.check_equal import check_equal
from everyrank.parallel.fsdp import apply_fsdp, reshard_after, scalar_parameters, set_requires_all_reduce
from everyrank.parallel.full_state import full_state_dict
from everyrank.parallel.gradients import average_replicated_grads, norm_params, sum_squares
from everyrank.parallel.loss import compute_loss
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import call_model, find_blocks, parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Shard the model over every rank of the world."""
    mesh = open_mesh(layout, world)
    parallel = parallelize(workload, layout, mesh)
    model = parallel.model
    apply_fsdp(model, find_blocks(workload, model), layout, mesh, parallel.experts)
    parallel.materialise()
    # Sharding replaced the parameters, so the optimizer is built after it.
    trainable = make_trainable(workload, layout, model)
    replicated = scalar_parameters(model)
    sum_grad_squares = functools.partial(sum_squares, norm_params(trainable.parameters, mesh), mesh)
    # fully_shard averages over these; ranks that split a matrix have the same loss
    num_averaged = mesh.size(*DATA_AXES)

    def step(batches: Sequence[Batch]) -> Tensor:
        parallel.before_first_update(lambda: check_equal(parallel, batches[0]))
        trainable.zero_grad()
        own = torch.zeros(2, dtype=torch.float64, device=world.device)
        total, count_work = own, None
        for is_last, batch in trainable.iter_micro_batches(batches):
            set_requires_all_reduce(model, is_last)
            with parallel.micro_batch(batch) as part:
                loss, share = compute_loss(workload, call_model(model, part.input), part, mesh)
                own += parallel.count_once(share)
                if is_last:
                    # The count travels while the last backward computes.
                    total = own.clone()
                    count_work = dist.all_reduce(total, group=world.group, async_op=True)
                trainable.backward(loss)
        average_replicated_grads(replicated, mesh)
        parallel.reduce_partial_grads()
        assert count_work is not None
        count_work.wait()
        trainable.optimizer_step(total, num_averaged, sum_grad_squares)
        parallel.end_update()
        return own

    def predict(batch: Batch) -> Any:
        with parallel.micro_batch(batch) as part:
            output = call_model(model, part.input)
        output = reshard_after(model, output)  # without a backward the root would stay gathered
        return parallel.gather_output(output)

    return Prepared(
        parallel,
        trainable,
        step,
        predict,
        full_state=lambda: full_state_dict(parallel),
        replicated_tensors=replicated,
        num_micro_batches=layout.accumulate,
    )
