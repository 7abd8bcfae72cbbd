"""Add up gradients over a group of ranks, in flat pieces; where no wrapper of torch's does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everyrank.parallel.mesh import Mesh, local

__all__ = ["average_over", "fill_in"]

_PIECE_BYTES = 25 << 20  # as DistributedDataParallel's buckets


def fill_in(parameters: Sequence[nn.Parameter], counts: Tensor) -> None:
    """Give a gradient of zeros to parameters that other ranks have one of; `counts` says how many have."""
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def average_over(parameters: Sequence[nn.Parameter], mesh: Mesh, *stages: str) -> None:
    """Average the gradients over the ranks that read; with "pipeline", add them up over the stages, too.

    One all-reduce for all gradients of one dtype, up to 25 MiB at a time.
    """
    group = mesh.group(*stages, "replicate", "shard")
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    waiting: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
    if group is not None:
        for piece in _pieces(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in piece])
            waiting.append((dist.all_reduce(flat, group=group, async_op=True), flat, piece))
    for work, flat, piece in waiting:
        assert work is not None
        work.wait()
        flat /= mesh.size("replicate", "shard")
        parts = flat.split([gradient.numel() for gradient in piece])
        for gradient, part in zip(piece, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in order, by dtype, in pieces of up to 25 MiB or one tensor."""
    pieces: list[list[Tensor]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        size = _PIECE_BYTES
        for tensor in (tensor for tensor in tensors if tensor.dtype is dtype):
            if size >= _PIECE_BYTES:
                pieces.append([])
                size = 0
            pieces[-1].append(tensor)
            size += tensor.nbytes
    return pieces
