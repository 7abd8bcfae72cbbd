"""Synchronous updates of a parameter server: one per global batch, from the gradients of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.parallel.loss import check_total
from everyrank.parallel.server.link import ServerLink
from everyrank.parallel.trainable import Trainable

__all__ = ["StepFunction", "step_empty_optimizer", "sync_server", "sync_trainer"]

StepFunction = Callable[[Sequence[Batch]], Tensor]
"""Function from micro-batches to the local (sum, count) of the loss: float64, shape (2,)."""


def sync_trainer(trainable: Trainable, link: ServerLink, compute_gradients: StepFunction) -> StepFunction:
    """Return the update function of a trainer.

    It receives the parameters, computes and sends gradients, and receives the loss over all trainers.
    """

    def update(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        link.pull()
        local_loss = compute_gradients(batches)
        link.push(local_loss)
        total = link.receive_total()
        # on CUDA, reading the total would wait for the device, so neither trainers nor servers check it there
        if total.device.type == "cpu":
            check_total(*total.tolist())
        step_empty_optimizer(trainable)
        return local_loss

    return update


def sync_server(trainable: Trainable, link: ServerLink) -> StepFunction:
    """Return the update function of a server.

    It sends the parameters to all trainers, sums their gradients, and steps the optimizer.
    """

    def update(_: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        link.give(*link.trainers)
        total = torch.zeros(2, dtype=torch.float64, device=link.mesh.world.device)
        # rank order, not arrival order: the sum then has the same rounding in each run
        for trainer in link.trainers:
            header = link.receive_header(trainer)[1]
            assert header is not None, "a synchronous trainer sent a request for parameters"
            link.add_gradients(trainer, header)
            total += header[:2].to(total.device)
        link.tell_total(total)
        trainable.enter_phase("optimizer")
        trainable.optimizer_step(total, sum_grad_squares=link.sum_squares)
        return torch.zeros_like(total)

    return update


def step_empty_optimizer(trainable: Trainable) -> None:
    """End an update on a trainer, whose optimizer has no parameters; torch's schedules expect optimizer.step()."""
    trainable.optimizer.step()
    trainable.advance_schedule()
