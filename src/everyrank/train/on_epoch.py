"""Calls the user's `Workload.on_epoch` on rank 0 after each epoch. When it calls `predict`, all ranks compute.

Under most layouts no rank has the whole model, so `predict` needs all ranks. But a function that ran on every rank
would print, plot and write once for each rank. So the other ranks wait, and join each `predict`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from everyrank.checkpoint.generators import generators, set_generators
from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import RankFailedError, describe
from everyrank.strategies import Prepared
from everyrank.world import broadcast_text
from everyrank.world.collectives import broadcast_value

__all__ = ["after_epoch"]


def after_epoch(prepared: Prepared, epoch: int, metrics: Mapping[str, float]) -> None:
    """Call `Workload.on_epoch`, if there is one, on rank 0; the other ranks join its predictions. A collective.

    An error of the function ends the training on every rank.
    """
    on_epoch, world = prepared.workload.on_epoch, prepared.world
    if on_epoch is None:
        return
    keys = (f"on_epoch/{epoch}/{number}" for number in itertools.count())

    def predict(value: Any) -> Any:
        _check_input(value)
        if world.size > 1:
            broadcast_text(world, next(keys), "predict")
        return _predict_on_all_ranks(prepared, value)

    generator_states = generators()  # restored below, so that the function does not change the training
    prepared.gather_for_eval()
    prepared.model.eval()
    with prepared.averaged_weights():
        if world.rank != 0:
            while (command := broadcast_text(world, next(keys), None)) == "predict":
                _predict_on_all_ranks(prepared, None)
            if command:
                raise RankFailedError(command)
        else:
            command = ""
            try:
                on_epoch(epoch, dict(metrics), predict)
            except BaseException as error:
                command = describe(error)
                raise
            finally:
                if world.size > 1:
                    broadcast_text(world, next(keys), command)
    prepared.model.train()
    set_generators(generator_states)


def _check_input(value: Any) -> None:
    """Raise `TypeError` on rank 0 for an input without a batch of tensors, before the other ranks join."""
    dims: list[int] = []
    map_tensors(value, lambda tensor: dims.append(tensor.dim()) or tensor)
    if not dims or dims[0] == 0:
        raise TypeError(
            f"predict() of on_epoch takes a batch of tensors like an input of train_data, not {type(value).__name__}; "
            "give for example torch.as_tensor(...)[None]"
        )


@torch.no_grad()
def _predict_on_all_ranks(prepared: Prepared, value: Any) -> Any:
    """Return the model's output for rank 0's input, on rank 0's CPU. A collective."""
    mesh, world, dtype = prepared.mesh, prepared.world, prepared.dtype
    value = broadcast_value(0, value, world)
    sizes: list[int] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tensor) if tensor.dim() else 1)
        return tensor.to(world.device, dtype if tensor.is_floating_point() else tensor.dtype)

    value = map_tensors(value, to_device)
    # the target is not used
    output = prepared.predict(Batch(value, value, sizes[0], 0, sizes[0]))
    output = map_tensors(output, lambda tensor: tensor.cpu())
    first_coordinate = dict.fromkeys(mesh.coordinate, 0)
    source_rank = mesh.rank_at(**{**first_coordinate, "pipeline": mesh.size("pipeline") - 1})
    return broadcast_value(source_rank, output, world) if source_rank else output
