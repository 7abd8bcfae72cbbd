"""Simulation of an asynchronous parameter server in one process, with the order of messages drawn from the seed.

The parameters that a trainer has pulled are kept until it pushes: its gradient is computed from them and applied to the
newest parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.server.asynchronous import order_of_trainers, refuse_batch_norm
from everyrank.parallel.trainable import Trainable, make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.simulated.ranks import batches_of_ranks, in_one_process, rank_gradients
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["simulate"]


def simulate(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Simulate a parameter server with `layout.simulated` trainers."""
    parallel = parallelize(workload, layout, open_mesh(layout, world))
    model = parallel.model
    refuse_batch_norm(layout, model)
    trainable = make_trainable(workload, layout, model)
    step_numbers = itertools.count()

    def step(batches: Sequence[Batch]) -> Tensor:
        batches_by_rank = batches_of_ranks(batches, layout)
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        pulled: dict[int, list[Tensor]] = {}
        for trainer in order_of_trainers(workload.seed, next(step_numbers), layout.simulated):
            if trainer not in pulled:
                pulled[trainer] = copies(trainable.parameters)
                continue
            newest, buffers = copies(trainable.parameters), copies(model.buffers())
            copy_into(pulled[trainer], trainable.parameters)
            _, share = rank_gradients(parallel, trainable, batches_by_rank[trainer], moves_statistics=True)
            copy_into(newest, trainable.parameters)
            if trainer:  # the model keeps only the buffers of trainer 0
                copy_into(buffers, model.buffers())
            if share[1] > 0:
                apply(trainable, float(share[1]))
            total += share
        trainable.advance_schedule()
        return total

    return in_one_process(parallel, trainable, step)


@torch.no_grad()
def apply(trainable: Trainable, count: float) -> None:
    """Rescale the gradients from sum / global_batch to the mean over `count` terms, clip them, and apply one update."""
    gradients = [parameter.grad for parameter in trainable.parameters if parameter.grad is not None]
    for gradient in gradients:
        gradient *= trainable.global_batch / count
    if trainable.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trainable.parameters, trainable.clip_norm)
    trainable.optimizer.step()


def copies(tensors: Any) -> list[Tensor]:
    """Copy the current values of the tensors."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def copy_into(values: list[Tensor], tensors: Any) -> None:
    """Copy each value into its tensor."""
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)
