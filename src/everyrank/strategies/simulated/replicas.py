"""Simulation of ddp, zero1 and fsdp with options that are not equivalent to one device: one replica after the other.

There is a single model. The gradient of each rank is computed from that rank's samples, with batch norm over these
only. Then the gradients are combined for one update. Gradient compression (parallel/compress.py) is implemented here a
second time, over a list of all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.errors import CannotRunError
from everyrank.layout import Layout
from everyrank.layout.options import BatchNormOptions, CompressOptions
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.compress import ROUNDED, Factors, initial_factors, orthonormalise
from everyrank.parallel.init_model import on_cpu
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.simulated.ranks import in_one_process, simulate_update
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["simulate"]

MakeCombine = Callable[[nn.Module, Layout], tuple[Callable[[nn.Parameter, list[Tensor]], Tensor], Any]]
_OPTIONS = ("batch_norm", "compress", "matrix_rank")  # only these options change the algorithm


def simulate(workload: Workload, layout: Layout, world: World, make_combine: MakeCombine | None = None) -> Prepared:
    """Simulate the replicas of `layout.simulated` ranks.

    `make_combine` returns a function that combines the gradients of all ranks, and one that clears its state; None:
    as the option `compress` does.
    """
    if layout.read(BatchNormOptions).batch_norm == "sync" and has_batch_norm(on_cpu(workload)):
        raise CannotRunError(
            "a simulation in one process cannot compute the gradient of each rank if batch norm spans all ranks; add "
            "batch_norm=local to compare"
        )
    options = {key: layout.options[key] for key in _OPTIONS if key in layout.options}
    layout = dataclasses.replace(layout, strategy="ddp", options=options)
    parallel = parallelize(workload, layout, open_mesh(layout, world))
    trainable = make_trainable(workload, layout, parallel.model)
    combine, reset = (make_combine or _make_combine)(parallel.model, layout)
    trainable.on_restore.append(reset)
    return in_one_process(parallel, trainable, functools.partial(simulate_update, parallel, trainable, combine))


def _make_combine(model: nn.Module, layout: Layout) -> tuple[Callable[[nn.Parameter, list[Tensor]], Tensor], Any]:
    """Return (parameter, its gradient on each rank) -> mean, and a function that clears the state."""
    options = layout.read(CompressOptions)
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    factors: dict[nn.Parameter, list[Factors]] = {}

    def combine(parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
        if options.compress in ROUNDED:
            return _mean_of_rounded(gradients, ROUNDED[options.compress])
        if options.compress == "powersgd" and parameter not in factors:
            initial = [initial_factors(parameter, options.matrix_rank, numbers[parameter]) for _ in gradients]
            factors[parameter] = [factor for factor in initial if factor is not None]
        if factors.get(parameter):
            return _power_step(gradients, factors[parameter])
        return torch.stack(gradients).mean(0)

    return combine, factors.clear


def _mean_of_rounded(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean of rounded gradients, rounded once more, in the dtype of the gradients."""
    full_dtype = gradients[0].dtype
    return (
        (torch.stack([gradient.to(dtype).to(full_dtype) for gradient in gradients]).sum(0) / len(gradients))
        .to(dtype)
        .to(full_dtype)
    )


def _power_step(gradients: Sequence[Tensor], factors: Sequence[Factors]) -> Tensor:
    """Return the mean gradient of one parameter as PowerSGD approximates it with r columns.

    `factors` are those of each rank, updated in place.
    """
    with_error = [
        gradient.reshape_as(factor.error) + factor.error for gradient, factor in zip(gradients, factors, strict=True)
    ]
    p = orthonormalise(torch.stack([matrix @ factors[0].q for matrix in with_error]).mean(0))
    q = torch.stack([matrix.T @ p for matrix in with_error]).mean(0)
    for matrix, factor in zip(with_error, factors, strict=True):
        factor.q, factor.error = q, matrix - p @ q.T
    return (p @ q.T).view_as(gradients[0])
