"""Gradient reduction over groups of ranks outside torch's wrappers, and the global gradient norm.

For the norm each rank squares its local gradients, and the squares are summed over all ranks. A gradient that several
ranks hold counts only on the first of them. Clipping by the norm of local parts, or with replicas counted twice, is not
equivalent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.layout import AXES, DATA_AXES
from everyrank.parallel.flat import buckets, flatten, write_back
from everyrank.parallel.mesh import Mesh, local_tensor
from everyrank.world import World

__all__ = [
    "all_reduce_grads",
    "average_replicated_grads",
    "is_norm_param",
    "norm_params",
    "sum_squares",
    "total_and_missing_grads",
]

_BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel


def norm_params(
    parameters: Sequence[nn.Parameter], mesh: Mesh, of_stage: Collection[nn.Parameter] = ()
) -> list[nn.Parameter]:
    """Return the parameters that this rank counts in the norm; computed once, after the model is laid out.

    `of_stage` are those that no other pipeline stage holds.
    """
    return [parameter for parameter in parameters if is_norm_param(parameter, mesh, parameter in of_stage)]


def is_norm_param(parameter: Tensor, mesh: Mesh, is_of_stage: bool) -> bool:
    """Whether this rank is the first of those with the same part of the parameter."""
    split = {"pipeline"} if is_of_stage else set[str]()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = zip(names, parameter.placements, strict=True)
        split |= {name for name, placement in placements if not placement.is_replicate()}
        if "shard" in split:
            split.add("context")  # parameters are sharded over both
            if "expert" not in names:
                split.add("expert")  # parameters outside the experts are also sharded over this axis
    return mesh.is_first(*(axis for axis in AXES if axis not in split))


def sum_squares(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """Return the sum of squares of all gradients: float64, shape (), the same on every rank. A collective.

    `parameters` are those that this rank counts (`norm_params`).
    """
    squares = _local_squares([local_tensor(p.grad) for p in parameters if p.grad is not None], mesh.world.device)
    if mesh.world.size > 1:
        dist.all_reduce(squares, group=mesh.world.group)
    return squares


def _local_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the local sum of squares: float64, shape (), with few operators for any number of parameters."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    norms = torch._foreach_norm(wide)  # pyright: ignore[reportPrivateUsage]  (documented)
    # cumsum adds in the order of a loop over the gradients; `sum` may add in a different order and round differently
    return torch.stack([norm.to(device) for norm in norms]).double().square().cumsum(0)[-1].clone()


def average_replicated_grads(parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Average the gradients of parameters that every rank keeps whole, one all-reduce each."""
    if mesh.size(*DATA_AXES) == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.group(*DATA_AXES))
            parameter.grad /= mesh.size(*DATA_AXES)


def total_and_missing_grads(share: Tensor, parameters: Sequence[nn.Parameter], world: World) -> Tensor:
    """Sum the local (sum, count) over all ranks, shape (2,). A collective over the world.

    Parameters whose gradient exists only on other ranks get a gradient of zeros. This is exchanged between hosts,
    because asking the device would synchronise CUDA.
    """
    has_grad = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float64)
    if share.device.type == "cpu":
        total = torch.cat([share, has_grad])
        dist.all_reduce(total, group=world.group)
        total, has_grad = total[:2], total[2:]
    else:
        total = share.clone()
        dist.all_reduce(total, group=world.group)
        dist.all_reduce(has_grad, group=world.group)
    _zero_missing_grads(parameters, has_grad.tolist())
    return total


def _zero_missing_grads(parameters: Sequence[nn.Parameter], counts: Sequence[float]) -> None:
    """Give zero gradients to parameters whose gradient exists only on other ranks; `counts` has the number of ranks."""
    for parameter, count in zip(parameters, counts, strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def all_reduce_grads(parameters: Sequence[nn.Parameter], mesh: Mesh, *stages: str) -> None:
    """Average gradients over the ranks that hold the same parameters; with "pipeline", also sum them over the stages.

    One all-reduce per dtype, in buckets of 25 MiB.
    """
    group = mesh.group(*stages, "replicate", "shard", "context")
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    waiting: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
    if group is not None:
        for bucket in buckets(gradients, _BUCKET_BYTES):
            flat = flatten(bucket)
            waiting.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    for work, flat, bucket in waiting:
        assert work is not None
        work.wait()
        flat /= mesh.size("replicate", "shard", "context")
        write_back(flat, bucket)
