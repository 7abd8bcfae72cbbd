"""What ddp, zero1 and fsdp are compared with where they change the mathematics: their replicas, one after the other.

The model is there once. Each rank's gradient is computed from the samples that this rank would read, with batch norm
over these alone; then the gradients are put together as they would arrive, for one update. What compressing does to
them (parallel/compress.py) is written here a second time, over a list of all ranks.
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
_OPTIONS = ("batch_norm", "compress", "matrix_rank")  # that change the mathematics; no others are read here


def simulate(workload: Workload, layout: Layout, world: World, make: MakeCombine | None = None) -> Prepared:
    """The replicas of `layout.simulated` ranks in one process. `make` gives how their gradients are put together,
    where that is not what `compress` says.
    """
    if layout.read(BatchNormOptions).batch_norm == "sync" and has_batch_norm(on_cpu(workload)):
        raise CannotRunError(
            "batch norm spans all ranks, and then one process cannot tell the gradient of one of them from those of "
            "the others; add batch_norm=local to compare"
        )
    options = {key: layout.options[key] for key in _OPTIONS if key in layout.options}
    layout = dataclasses.replace(layout, strategy="ddp", options=options)
    parallel = parallelize(workload, layout, open_mesh(layout, world))
    trainable = make_trainable(workload, layout, parallel.model)
    combine, forget = (make or _make_combine)(parallel.model, layout)
    trainable.on_restore.append(forget)
    return in_one_process(parallel, trainable, functools.partial(simulate_update, parallel, trainable, combine))


def _make_combine(model: nn.Module, layout: Layout) -> tuple[Callable[[nn.Parameter, list[Tensor]], Tensor], Any]:
    """(parameter, its gradient on each rank) -> their mean as it arrives; and what forgets what is kept."""
    options = layout.read(CompressOptions)
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    kept: dict[nn.Parameter, list[Factors]] = {}

    def combine(parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
        if options.compress in ROUNDED:
            return _mean_of_rounded(gradients, ROUNDED[options.compress])
        if options.compress == "powersgd" and parameter not in kept:
            found = [initial_factors(parameter, options.matrix_rank, numbers[parameter]) for _ in gradients]
            kept[parameter] = [one for one in found if one is not None]
        if kept.get(parameter):
            return _power_step(gradients, kept[parameter])
        return torch.stack(gradients).mean(0)

    return combine, kept.clear


def _mean_of_rounded(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean over ranks of gradients that each rank has rounded, rounded once more; in the gradients' own dtype."""
    own = gradients[0].dtype
    return (torch.stack([one.to(dtype).to(own) for one in gradients]).sum(0) / len(gradients)).to(dtype).to(own)


def _power_step(gradients: Sequence[Tensor], kept: Sequence[Factors]) -> Tensor:
    """What PowerSGD makes of the gradients of all ranks, of one parameter: their mean, as far as r columns say it.

    `kept` are the factors of each rank, which it changes.
    """
    with_error = [gradient.reshape_as(own.error) + own.error for gradient, own in zip(gradients, kept, strict=True)]
    p = orthonormalise(torch.stack([matrix @ kept[0].q for matrix in with_error]).mean(0))
    q = torch.stack([matrix.T @ p for matrix in with_error]).mean(0)
    for matrix, own in zip(with_error, kept, strict=True):
        own.q, own.error = q, matrix - p @ q.T
    return (p @ q.T).view_as(gradients[0])
