"""Gradients that no wrapper of torch's takes care of: reduced over groups of ranks, and their global norm.

The norm: each rank squares what it holds, and the squares are added up over all ranks; what several of them hold is
counted by the first of these alone. Clipping by anything else (the norm of one rank's parts, or of replicas counted
twice) is another training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.layout import AXES, DATA_AXES
from everyrank.parallel.flat import flatten, write_back
from everyrank.parallel.mesh import Mesh, local_tensor

__all__ = [
    "all_reduce_grads",
    "average_replicated_grads",
    "is_norm_param",
    "norm_params",
    "sum_squares",
    "zero_missing_grads",
]

_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's


def norm_params(
    parameters: Sequence[nn.Parameter], mesh: Mesh, of_stage: Collection[nn.Parameter] = ()
) -> list[nn.Parameter]:
    """The parameters whose parts this rank counts in the norm; found once, when all is laid out.

    `of_stage` are those that no other stage of a pipeline holds.
    """
    return [parameter for parameter in parameters if is_norm_param(parameter, mesh, parameter in of_stage)]


def is_norm_param(parameter: Tensor, mesh: Mesh, is_of_stage: bool) -> bool:
    """Whether this rank is the first of those that hold the same part of the parameter."""
    split = {"pipeline"} if is_of_stage else set[str]()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split |= {name for name, how in zip(names, parameter.placements, strict=True) if not how.is_replicate()}
        if "shard" in split:
            split.add("context")  # parameters are sharded over both
            if "expert" not in names:
                split.add("expert")  # and, where they are not an expert's, over this one
    return mesh.is_first(*(axis for axis in AXES if axis not in split))


def sum_squares(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """The sum of squares of all gradients: float64, shape (), the same on every rank. A collective over the world.

    `parameters` are those that this rank counts (`norm_params`).
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.world.device)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            own = local_tensor(gradient)
            squares += torch.linalg.vector_norm(own.to(torch.promote_types(own.dtype, torch.float32))).double().square()
    if mesh.world.size > 1:
        dist.all_reduce(squares, group=mesh.world.group)
    return squares


def average_replicated_grads(parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Average the gradients of a few parameters that every rank keeps whole, one all-reduce each."""
    if mesh.size(*DATA_AXES) == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.group(*DATA_AXES))
            parameter.grad /= mesh.size(*DATA_AXES)


def zero_missing_grads(parameters: Sequence[nn.Parameter], counts: Tensor) -> None:
    """Give a gradient of zeros to parameters that other ranks have one of; `counts` (one each): how many have."""
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def all_reduce_grads(parameters: Sequence[nn.Parameter], mesh: Mesh, *stages: str) -> None:
    """Average the gradients over the ranks that hold the same; with "pipeline", add them up over the stages, too.

    One all-reduce for all gradients of one dtype, in buckets of 25 MiB.
    """
    group = mesh.group(*stages, "replicate", "shard", "context")
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    waiting: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
    if group is not None:
        for bucket in _buckets(gradients):
            flat = flatten(bucket)
            waiting.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    for work, flat, bucket in waiting:
        assert work is not None
        work.wait()
        flat /= mesh.size("replicate", "shard", "context")
        write_back(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in order, by dtype, in buckets of up to 25 MiB or one tensor."""
    buckets: list[list[Tensor]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        size = _BUCKET_BYTES
        for tensor in (tensor for tensor in tensors if tensor.dtype is dtype):
            if size >= _BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.nbytes
    return buckets
