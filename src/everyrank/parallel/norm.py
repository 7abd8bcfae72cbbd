"""The global norm of gradients that lie in parts on many ranks.

Each rank squares what it holds, and the squares are added up over all ranks; what several of them hold is counted by
the first of these alone. Clipping by anything else (the norm of one rank's parts, or of replicas counted twice) is
another training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.layout import AXES
from everyrank.parallel.mesh import Mesh, local

__all__ = ["counted", "is_counted", "sum_squares"]


def counted(
    parameters: Sequence[nn.Parameter], mesh: Mesh, of_stage: Collection[nn.Parameter] = ()
) -> list[nn.Parameter]:
    """The parameters whose parts this rank counts in the norm; found once, when all is laid out.

    `of_stage` are those that no other stage of a pipeline holds.
    """
    return [parameter for parameter in parameters if is_counted(parameter, mesh, parameter in of_stage)]


def sum_squares(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """The sum of squares of all gradients, float64, the same on every rank. A collective over the world.

    `parameters` are those that this rank counts.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.world.device)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            own = local(gradient)
            squares += torch.linalg.vector_norm(own.to(torch.promote_types(own.dtype, torch.float32))).double().square()
    if mesh.world.size > 1:
        dist.all_reduce(squares, group=mesh.world.group)
    return squares


def is_counted(parameter: Tensor, mesh: Mesh, is_of_stage: bool) -> bool:
    """Whether this rank is the first of those that hold the same part of the parameter."""
    split = {"pipeline"} if is_of_stage else set[str]()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split |= {name for name, how in zip(names, parameter.placements, strict=True) if not how.is_replicate()}
        if "shard" in split:
            split.add("context")  # parameters are sharded over both
    return mesh.is_first(*(axis for axis in AXES if axis not in split))
