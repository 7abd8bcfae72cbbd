"""Distributed data parallel: every rank holds the whole model and averages gradients.

Memory         parameters, gradients and optimizer state in full on every rank
Communication  one all-reduce of the gradients per update, in buckets, overlapped with backward; with (sum, count) of
               the loss as two more elements
Use when       the model and its optimizer fit on one device
Exact          yes; with batch_norm=local or compress=... no: compared with a simulation of the same in one process
Source         Li et al., VLDB 2020

Keys: bucket_mb, the size of a bucket in MiB; find_unused=true, for models that leave parameters out of some
updates; static_graph=true, for models that use the same ones in every update; batch_norm=local, for statistics over
each rank's own samples, and rank 0's running ones (one broadcast per update); compress=fp16, bf16 or powersgd (with
matrix_rank, 1 if left out), to compress gradients (parallel/compress.py). With context=N the ranks
that share a sequence are replicas, too (parallel/context). With tensor=N the matrices are split
(strategies/tensor.py), and torch's `fully_shard` keeps the replicas of the parts: it is
`fsdp:replicate=...,shard=1,tensor=N`, sends what that sends, and with context=N or expert=N as well shards the
parameters along that axis. With expert=N ranks hold different experts of a mixture (parallel/expert.py), and
replicas of experts average their gradients in a separate all-reduce.
"""

from __future__ import annotations

import contextlib
import functools

from torch.distributed.tensor import DTensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.check_equal import check_equal
from everyrank.parallel.compress import apply_compression
from everyrank.parallel.ddp import apply_ddp, check_reduced, check_unused_parameters, global_sum_and_count
from everyrank.parallel.full_state import full_state_dict
from everyrank.parallel.gradients import all_reduce_grads, norm_params, sum_squares
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import make_predict, make_step
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Replicate the model on every rank of the world."""
    mesh = open_mesh(layout, world)
    has_experts = mesh.size("expert") > 1  # with experts, DistributedDataParallel must not broadcast them
    parallel = parallelize(workload, layout, mesh, broadcast=has_experts)
    model = parallel.model
    experts = [parameter for module in parallel.experts for parameter in module.parameters()]
    ddp = apply_ddp(model, layout, world, experts)
    trainable = make_trainable(workload, layout, model)
    named = dict(model.named_parameters())
    reset_compression = apply_compression(ddp, model, layout, world)
    trainable.on_restore += [reset_compression] if reset_compression else []
    norm_parameters = norm_params(trainable.parameters, mesh)
    sum_grad_squares = functools.partial(sum_squares, norm_parameters, mesh) if has_experts else None

    def around(is_last: bool, _: Batch) -> contextlib.AbstractContextManager[None]:
        # Only the last micro-batch sends gradients. no_sync has to be entered before the forward pass.
        return contextlib.nullcontext() if is_last else ddp.no_sync()

    def after_backward() -> None:
        check_unused_parameters(named, layout, world)
        check_reduced(ddp, layout)
        all_reduce_grads(experts, mesh)  # over the ranks that hold the same experts

    step = make_step(
        parallel,
        trainable,
        forward=ddp,  # returns the output and the carrier of [sum, count]
        around=around,
        after_backward=after_backward,
        sum_over_ranks=lambda _: global_sum_and_count(ddp, world),
        num_averaged=world.size,
        sum_grad_squares=sum_grad_squares,
        before_first=lambda batch: check_equal(parallel, batch),
        carrier=ddp.module.carrier,
    )
    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=lambda: full_state_dict(parallel),
        replicated_tensors=[t for t in [*trainable.parameters, *model.buffers()] if not isinstance(t, DTensor)],
        num_micro_batches=layout.accumulate,
    )
