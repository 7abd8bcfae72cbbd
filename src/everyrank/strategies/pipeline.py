"""Pipeline parallel: every rank holds some of the blocks, and micro-batches go through the ranks one after the other.

    rank 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3        2 ranks, 4 micro-batches, schedule 1f1b; a backward takes
    rank 1   .. F0 B0 .. F1 B1 .. F2 B2 F3 B3        twice a forward; idle: (2 - 1) / (4 + 2 - 1) of the time

Memory         its blocks with their gradients and optimizer state; layers outside the blocks (embeddings, head) in full
Communication  per micro-batch and stage: forward the output of its last block to the next stage, backward the gradient
               of its input to the one before (with the first of each shape goes a header of ten numbers). Per update:
               an all-reduce of loss, count and one flag for each parameter outside of the blocks, one (in pieces of 25
               MiB) of the gradients of these over all stages and readers, and one of the blocks' over replicas; with
               clip_norm, one of the sum of squares; in the first one, of whether the blocks run in order, and of
               whether the loss asked for the whole batch. Shards travel as under fsdp, parts of matrices as under
               tensor; what is computed in front of the blocks (an embedding) every stage computes, with what travels
               for it
Use when       a deep model does not fit on one device and the network is slow: messages are few and small
Exact          yes, for models in which each block gets the unchanged output of the previous one (others are refused)
Source         Huang et al. 2019 (gpipe); Narayanan et al. 2019 and 2021 (1f1b, interleaved); Qi et al. 2024
               (zero-bubble)

Keys: schedule=1f1b, gpipe, interleaved or zero-bubble; microbatches, how many go through together (twice the ranks);
chunks, the stages on each rank under interleaved (2). `accumulate` is the number of rounds in an update. The stages
have about equal numbers of multiplications per position, with the head on the last one. meta=true fills the
blocks from a file, for a model that fits in the memory of no rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import PipelineOptions
from everyrank.parallel.batch_gather import raise_on_all_ranks
from everyrank.parallel.fsdp import apply_fsdp_to_blocks, is_sharded
from everyrank.parallel.full_state import full_state_dict
from everyrank.parallel.gradients import all_reduce_grads, norm_params, sum_squares, total_and_missing_grads
from everyrank.parallel.loss import compute_loss
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import call_model, parallelize
from everyrank.parallel.pipeline.deferred import WeightGradQueue
from everyrank.parallel.pipeline.run import PipelineRun
from everyrank.parallel.pipeline.stage import apply_pipeline
from everyrank.parallel.precision import autocast
from everyrank.parallel.tensor.apply import is_split
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Split the model into stages over the pipeline axis; shard or replicate each stage over the other axes."""
    mesh, options = open_mesh(layout, world), layout.read(PipelineOptions)
    weight_grads = WeightGradQueue(is_used=options.schedule == "zero-bubble")
    parallel = parallelize(workload, layout, mesh, contexts=[weight_grads.context])
    model = parallel.model
    stages = apply_pipeline(model, workload, layout, mesh)
    apply_fsdp_to_blocks(stages.own_blocks(), layout, mesh)
    parallel.materialise()
    # Cutting and sharding replaced parameters, so the optimizer is built after them.
    trainable = make_trainable(workload, layout, model)
    stage_parameters = stages.own_parameters()
    outside_parameters = [parameter for parameter in trainable.parameters if parameter not in set(stage_parameters)]
    sum_grad_squares = functools.partial(
        sum_squares, norm_params(trainable.parameters, mesh, set(stage_parameters)), mesh
    )
    pipeline = PipelineRun(mesh, stages, options, weight_grads, trainable.enter_phase)
    loss_errors: list[
        UnsupportedLayoutError
    ] = []  # on the stage that computes the loss, while others wait for its gradient

    def step(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        is_first = parallel.call_once(lambda: check_block_order(batches[0]))
        share = torch.zeros(2, dtype=torch.float64, device=world.device)
        for first in range(0, len(batches), pipeline.num_micro_batches):
            share += flow(batches[first : first + pipeline.num_micro_batches])
        raise_on_all_ranks(loss_errors, world, is_first)
        parallel.reduce_partial_grads()
        total = total_and_missing_grads(share, outside_parameters, world)
        all_reduce_grads(outside_parameters, mesh, "pipeline")
        all_reduce_grads([parameter for parameter in stage_parameters if not is_sharded(parameter)], mesh)
        # all gradients are averaged over the ranks that read by now
        trainable.optimizer_step(total, mesh.size("replicate", "shard"), sum_grad_squares)
        return share

    def check_block_order(batch: Batch) -> None:
        errors: list[UnsupportedLayoutError] = []
        try:
            with parallel.micro_batch(batch) as micro_batch:
                stages.check_block_order(lambda: call_model(model, micro_batch.input))
        except UnsupportedLayoutError as error:
            errors.append(error)
        # raised on all ranks at the same time: a later rank would be ended before it reports the error
        raise_on_all_ranks(errors, world, is_first=True)

    def flow(batches: Sequence[Batch]) -> Tensor:
        """Run micro-batches through the pipeline, forward and backward; return the local (sum, count), shape (2,)."""
        shares = [torch.zeros(2, dtype=torch.float64, device=world.device)]

        def forward(stage: int, index: int, received: Tensor | None) -> Tensor:
            with parallel.micro_batch(batches[index]) as micro_batch, autocast(layout, world):
                output, is_end = stages.run(stage, received, lambda: call_model(model, micro_batch.input))
                if is_end:
                    output, share = compute_loss(workload, output, micro_batch, mesh, loss_errors)
                    shares.append(parallel.count_once(share))
            return output

        def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
            with parallel.micro_batch(batches[index]):
                if gradient is None:
                    trainable.backward(output)
                elif output.requires_grad:
                    torch.autograd.backward(output, gradient)

        pipeline.run(batches, forward, backward)
        return torch.stack(shares).sum(0)

    def predict(batch: Batch) -> Any:
        with parallel.micro_batch(batch) as micro_batch, autocast(layout, world):
            forward = functools.partial(call_model, model, micro_batch.input)
            output = pipeline.forward_only(batch, lambda stage, received: stages.run(stage, received, forward))
        return parallel.gather_output(output)

    return Prepared(
        parallel,
        trainable,
        step,
        predict,
        full_state=lambda: full_state_dict(parallel, stages),
        replicated_tensors=[
            tensor for tensor in [*outside_parameters, *stages.outside_buffers()] if not is_split(tensor)
        ],
        num_micro_batches=layout.accumulate * pipeline.num_micro_batches,
        idle=pipeline.idle,
    )
