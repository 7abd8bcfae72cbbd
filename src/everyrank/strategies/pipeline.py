"""Pipeline parallel: every rank holds some of the blocks, and micro-batches go through the ranks one after the other.

    rank 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3        2 ranks, 4 micro-batches, schedule 1f1b; a backward takes
    rank 1   .. F0 B0 .. F1 B1 .. F2 B2 F3 B3        twice a forward; idle: (2 - 1) / (4 + 2 - 1) of the time

Holds     its blocks with their gradients and optimizer state; what is outside the blocks (embeddings, head) in full
Travels   per micro-batch and stage: forward the output of its last block to the next stage, backward the gradient of
          its input to the one before (with the first of each shape goes a header of ten numbers). Per update: an
          all-reduce of loss, count and one flag for each parameter outside of the blocks, one (in pieces of 25 MiB) of
          the gradients of these over all stages and readers, and one of the blocks' over replicas; with clip_norm, one
          of the sum of squares; in the first one, of whether the loss asked for the whole batch. Shards travel as
          under fsdp, parts of matrices as under tensor; what is computed in front of the blocks (an embedding) every
          stage computes, with what travels for it
Use when  the model is deep and does not fit, and links between devices are slow: little travels, and seldom
Exact     yes, for models whose every block takes, untouched, what the one before returns (else refused)
Source    Huang et al. 2019 (gpipe); Narayanan et al. 2019 and 2021 (1f1b, interleaved); Qi et al. 2024 (zero-bubble)

Keys: schedule=1f1b, gpipe, interleaved or zero-bubble; microbatches, how many go through together (twice the ranks);
chunks, the stages on each rank under interleaved (2). `accumulate` is how often that is done in an update. The stages
are as equal as can be by multiplications for each position, the head counted on the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.errors import UnfitError
from everyrank.layout import Layout
from everyrank.parallel.build import autocast, build, call
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.norm import counted, sum_squares
from everyrank.parallel.pipe import Pipe
from everyrank.parallel.rows import raise_together
from everyrank.parallel.shard import is_sharded, shard_each
from everyrank.parallel.stage import cut_stages
from everyrank.parallel.state import gathered_state
from everyrank.parallel.sums import average_over, fill_in
from everyrank.parallel.tensor import is_split
from everyrank.strategies import Prepared
from everyrank.strategies._update import backward, begin, loss_of, make_optimizer, make_scale, update
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Cut the model into stages over the pipeline axis; shard or replicate each over the others."""
    mesh = open_mesh(layout, world)
    built = build(workload, layout, mesh)
    model = built.model
    stages = cut_stages(model, workload, layout, mesh)
    shard_each(stages.own_blocks(), layout, mesh)
    # Cutting and sharding replaced parameters, so the optimizer is built after them.
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    own = stages.own_parameters()
    squares = functools.partial(sum_squares, counted(parameters, mesh, set(own)), mesh)
    outside = [parameter for parameter in parameters if parameter not in set(own)]
    pipe = Pipe(mesh, stages, layout)
    refused: list[UnfitError] = []  # by the stage that takes the loss, while the others wait for its gradient
    built.forward.contexts.append(pipe.deferring)
    built.forward.again.append(pipe.deferring)

    def step(batches: Sequence[Batch]) -> Tensor:
        begin(parameters)
        is_first = built.once(lambda: rehearse(batches[0]))
        share = torch.zeros(2, dtype=torch.float64, device=world.device)
        for first in range(0, len(batches), pipe.in_flight):
            share += flow(batches[first : first + pipe.in_flight])
        raise_together(refused, world, is_first)
        built.finish()
        flags = torch.tensor([parameter.grad is not None for parameter in outside], device=world.device)
        total = torch.cat([share, flags.double()])
        dist.all_reduce(total, group=world.group)
        fill_in(outside, total[2:])
        average_over(outside, mesh, "pipeline")
        average_over([parameter for parameter in own if not is_sharded(parameter)], mesh)
        readers = mesh.size("replicate", "shard")  # all gradients are averaged over them by now
        update(workload, total[:2], parameters, optimizer, schedule, scale, readers, squares)
        return share

    def rehearse(batch: Batch) -> None:
        with built.passing(batch) as part:
            stages.rehearse(lambda: call(model, part.input))

    def flow(batches: Sequence[Batch]) -> Tensor:
        """Micro-batches through the pipeline, forward and backward; this rank's share of (sum, count)."""
        shares = [torch.zeros(2, dtype=torch.float64, device=world.device)]

        def forward(stage: int, micro: int, received: Tensor | None) -> Tensor:
            with built.passing(batches[micro]) as part, autocast(layout, world):
                output, is_end = stages.run(stage, received, lambda: call(model, part.input))
                if is_end:
                    output, share = loss_of(workload, output, part, mesh, refused)
                    shares.append(built.share(share))
            return output

        def back(micro: int, output: Tensor, gradient: Tensor | None) -> None:
            with built.passing(batches[micro]):
                if gradient is None:
                    backward(workload, scale, output)
                elif output.requires_grad:
                    torch.autograd.backward(output, gradient)

        pipe.run(batches, forward, back)
        return torch.stack(shares).sum(0)

    def predict(batch: Batch) -> Any:
        with built.passing(batch) as part, autocast(layout, world):
            forward = functools.partial(call, model, part.input)
            output = pipe.through(batch, lambda stage, received: stages.run(stage, received, forward))
        return built.whole(output)

    return Prepared(
        mesh=mesh,
        step=step,
        predict=predict,
        state=lambda: gathered_state(model, mesh, stages),
        replicas=[tensor for tensor in [*outside, *stages.outside_buffers()] if not is_split(tensor)],
        micro_batches=layout.accumulate * pipe.in_flight,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
        idle=pipe.idle,
    )
