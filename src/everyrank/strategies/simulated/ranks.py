"""Building blocks of simulations: micro-batches by rank, the gradient of one rank, one update of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.parallel.full_state import replicated_state_dict
from everyrank.parallel.parallelize import ParallelModel
from everyrank.parallel.trainable import Trainable
from everyrank.strategies import Prepared
from everyrank.strategies.step import forward_backward, make_predict

__all__ = ["batches_of_ranks", "in_one_process", "rank_gradients", "simulate_update"]


def batches_of_ranks(batches: Sequence[Batch], layout: Layout) -> list[Sequence[Batch]]:
    """Split the micro-batches of an update by simulated rank."""
    num_each = len(batches) // layout.simulated
    return [batches[rank * num_each : (rank + 1) * num_each] for rank in range(layout.simulated)]


def rank_gradients(
    parallel: ParallelModel, trainable: Trainable, batches: Sequence[Batch], moves_statistics: bool
) -> tuple[list[Tensor | None], Tensor]:
    """Return (gradients by parameter, [sum, count] of shape (2,)) for one simulated rank's micro-batches.

    The gradients are those of sum / global_batch. `moves_statistics`: update the running statistics of batch norm.
    """
    state = parallel.micro_batch_state
    trainable.zero_grad()
    total = forward_backward(
        parallel,
        trainable,
        batches,
        around=lambda _, __: contextlib.nullcontext() if moves_statistics else state.recomputing(),
    )
    return [parameter.grad for parameter in trainable.parameters], total


def simulate_update(
    parallel: ParallelModel,
    trainable: Trainable,
    combine: Callable[[nn.Parameter, list[Tensor]], Tensor],
    batches: Sequence[Batch],
) -> Tensor:
    """Run one update of replicas; `combine` maps (parameter, its gradient on each rank) to their mean.

    Each rank normalises batch norm by its own samples, and the running statistics are rank 0's. Returns [sum, count].
    """
    ranks = batches_of_ranks(batches, parallel.layout)
    results = [rank_gradients(parallel, trainable, rank_batches, rank == 0) for rank, rank_batches in enumerate(ranks)]
    gradients: list[list[Tensor | None]] = [rank_grads for rank_grads, _ in results]
    total = torch.stack([share for _, share in results]).sum(0)
    for parameter, *rank_grads_of_parameter in zip(trainable.parameters, *gradients, strict=True):
        filled: list[Any] = [
            torch.zeros_like(parameter) if gradient is None else gradient for gradient in rank_grads_of_parameter
        ]
        parameter.grad = (
            None if all(gradient is None for gradient in rank_grads_of_parameter) else combine(parameter, filled)
        )
    trainable.optimizer_step(total, num_averaged=parallel.layout.simulated)
    return total


def in_one_process(
    parallel: ParallelModel, trainable: Trainable, step: Callable[[Sequence[Batch]], Tensor]
) -> Prepared:
    """Wrap a simulation as `Prepared`: its model is evaluated and compared after each step."""
    return Prepared(
        parallel,
        trainable,
        step,
        make_predict(parallel),
        full_state=lambda: replicated_state_dict(parallel.model, rank=0),
        replicated_tensors=[],
        num_micro_batches=parallel.layout.accumulate,
    )
