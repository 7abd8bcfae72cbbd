"""Asynchronous parameter server: applies each trainer's gradient as soon as it arrives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from everyrank.data import Batch
from everyrank.data.seeds import mix
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.server.link import ServerLink
from everyrank.parallel.server.synchronous import StepFunction, step_empty_optimizer
from everyrank.parallel.trainable import Trainable

__all__ = ["async_server", "async_trainer", "order_of_trainers", "refuse_batch_norm"]


def order_of_trainers(seed: int, number: int, num_trainers: int) -> list[int]:
    """Draw the order of asynchronous update `number`: each trainer twice, first to pull, then to push."""
    order = [trainer for trainer in range(num_trainers) for _ in range(2)]
    random.Random(mix(seed, number)).shuffle(order)  # noqa: S311
    return order


def async_trainer(trainable: Trainable, link: ServerLink, compute: StepFunction) -> StepFunction:
    """Request the parameters, pull, compute the gradient of the mean over this part, and push."""

    def update(batches: Sequence[Batch]) -> Tensor:
        trainable.zero_grad()
        link.pull(asks=True)
        share = compute(batches)
        link.push(share * normalise_gradients(trainable, share))
        return share

    return update


def normalise_gradients(trainable: Trainable, share: Tensor) -> bool:
    """Normalise and clip the gradients by the trainer's own number of loss terms. Returns False if there are none.

    A loss that is NaN or infinite is not applied; the loop reports it on every rank.
    """
    has_terms = bool(share[1] > 0) and bool(share.isfinite().all())
    if has_terms:
        trainable.optimizer_step(share)  # normalises and clips; a trainer's optimizer has no parameters to update
    else:
        step_empty_optimizer(trainable)
    return has_terms


def async_server(trainable: Trainable, link: ServerLink, seed: int | None) -> StepFunction:
    """Serve each trainer's pull and push, in the order drawn from `seed`, or by arrival for None."""
    update_numbers = itertools.count()

    def update(_: Sequence[Batch]) -> Tensor:
        order: list[int | None] = [None] * (2 * len(link.trainers))
        if seed is not None:
            drawn = order_of_trainers(seed, next(update_numbers), len(link.trainers))
            order = [link.trainers[index] for index in drawn]
        for expected in order:
            trainer, head = link.receive_header(expected)
            if head is None:
                link.give(trainer)
            else:
                trainable.zero_grad()
                link.add_gradients(trainer, head)
                trainable.enter_phase("optimizer")
                if head[1]:
                    trainable.optimizer.step()
        trainable.advance_schedule()
        return torch.zeros(2, dtype=torch.float64, device=link.mesh.world.device)

    return update


def refuse_batch_norm(layout: Layout, model: nn.Module) -> None:
    """Raise `UnsupportedLayoutError` for a model with batch statistics over all trainers."""
    if has_batch_norm(model):
        raise UnsupportedLayoutError(
            f"layout {layout}: batch norm takes its statistics over all trainers, which would have to wait for each "
            "other; use updates=sync, or a norm whose statistics do not span samples"
        )
