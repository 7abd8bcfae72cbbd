"""Synchronous updates of a parameter server: one per global batch, from the gradients of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.parallel.loss import check_total
from everyrank.parallel.server.link import ServerLink
from everyrank.parallel.trainable import Trainable

__all__ = ["StepFunction", "step_nothing", "sync_server", "sync_trainer"]

StepFunction = Callable[[Sequence[Batch]], Tensor]
"""Micro-batches -> this rank's share of (sum, count) of the loss, float64, shape (2,)."""


def sync_trainer(trainable: Trainable, link: ServerLink, compute: StepFunction) -> StepFunction:
    """Pull, compute and push; then receive the loss over all trainers."""

    def update(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        link.pull()
        share = compute(batches)
        link.push(share)
        total = link.receive_total()
        if total.device.type == "cpu":  # as the servers do
            check_total(*total.tolist())
        step_nothing(trainable)
        return share

    return update


def sync_server(trainable: Trainable, link: ServerLink) -> StepFunction:
    """Send the parameters to all trainers, sum their gradients, and make one update."""

    def update(_: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        link.give(*link.trainers)
        total = torch.zeros(2, dtype=torch.float64, device=link.mesh.world.device)
        for trainer in link.trainers:  # in this order: that of arrival would change the last bits
            head = link.receive_head(trainer)[1]
            assert head is not None, "a trainer of synchronous updates does not ask"
            link.add_gradients(trainer, head)
            total += head[:2].to(total.device)
        link.tell_total(total)
        trainable.enter_phase("optimizer")
        trainable.optimizer_step(total, sum_grad_squares=link.sum_squares)
        return torch.zeros_like(total)

    return update


def step_nothing(trainable: Trainable) -> None:
    """End an update on a trainer, whose optimizer has no parameters; torch's schedules require a step."""
    trainable.optimizer.step()
    trainable.advance_schedule()
