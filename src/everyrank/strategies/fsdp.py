"""Fully sharded data parallel (FSDP2): every rank holds a part of everything, and gathers what it computes with.

Holds     a part of each parameter, its gradient and its optimizer state
Travels   per micro-batch: an all-gather of each block's parameters in forward and again in backward, an all-gather
          of the rest in forward, a reduce-scatter of each block's gradients and of the rest's; per update: one
          all-reduce of the count of loss terms (two elements), overlapped with backward, and one of each parameter
          without dimensions, which cannot be sharded
Use when  the model or its optimizer does not fit on one device
Exact     yes
Source    Rajbhandari et al., SC 2020 (P_os+g+p); Zhao et al., VLDB 2023

Keys: reshard_after_forward=false keeps gathered blocks until backward: more memory, one all-gather less.
Blocks are the modules at `Workload.blocks`; without it the whole model is one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from everyrank.data import Batch, Slice
from everyrank.layout import Layout
from everyrank.parallel.build import build, call, find_blocks
from everyrank.parallel.replicate import average_gradients, broadcast_from_rank_0
from everyrank.parallel.shard import reshard, scalar_parameters, shard
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
    built = build(workload, layout, world)
    model = built.model
    broadcast_from_rank_0(model, world)
    shard(model, find_blocks(workload, model), layout, world)
    # Sharding replaced the parameters, so the optimizer is built after it.
    optimizer, schedule = make_optimizer(workload, model)
    scale = make_scale(layout)
    parameters = list(model.parameters())
    whole = scalar_parameters(model)

    def step(batches: Sequence[Batch]) -> Tensor:
        begin(parameters)
        own = torch.zeros(2, dtype=torch.float64, device=world.device)
        total, counting = own, None
        for is_last, batch in passes(batches):
            built.forward.is_borrowed = not batch.size
            loss, share = loss_of(workload, call(model, batch.input), batch)
            own += share
            if is_last:
                # The count travels while the last backward computes.
                total = own.clone()
                counting = dist.all_reduce(total, group=world.group, async_op=True)
            backward(workload, scale, loss)
        average_gradients(whole, world)
        assert counting is not None
        counting.wait()
        update(workload, total, parameters, optimizer, schedule, scale, world.size, sum_squares)
        return own

    def sum_squares(squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=world.group)
        replicated = sum((p.grad.double().square() for p in whole if p.grad is not None), torch.zeros_like(squares))
        return squares - (world.size - 1) * replicated

    def predict(batch: Batch) -> Any:
        built.forward.is_borrowed = not batch.size
        output = call(model, batch.input)
        reshard(model)  # no backward follows that would
        return output

    def state() -> dict[str, Tensor]:
        # a collective: every rank takes part, rank 0 gets the tensors
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: tensor.clone() for name, tensor in full.items() if isinstance(tensor, Tensor)}

    return Prepared(
        reads=Slice(world.rank, world.size),
        step=step,
        predict=predict,
        state=state,
        replicas=False,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scale=scale,
    )
