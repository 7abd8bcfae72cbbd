"""Gradient compression, as communication hooks of DistributedDataParallel.

fp16, bf16   Each rank rounds its gradient and sends one slice to each rank. Each rank adds up its slices in rank order
             and in the precision of the gradient, and rounds the sum; then all ranks gather the sums:

                 rank 0   [a0 a1]            [a0 b0] -> s0          [s0 s1]
                                  all-to-all                all-gather
                 rank 1   [b0 b1]            [a1 b1] -> s1          [s0 s1]

             An all-reduce has the same two steps, so this sends half as many bytes. (torch's hooks add up in 16 bits,
             in an order that the backend chooses: such a sum overflows sooner and cannot be reproduced.)

powersgd     A matrix M (n, m) is sent as P = M Q (n, r), orthonormalised, and Q = M^T P (m, r): r (n + m) elements
             instead of n m. The approximation error is added to the next gradient of the rank (error feedback).

Source: torch.distributed.algorithms.ddp_comm_hooks; Vogels, Karimireddy and Jaggi, NeurIPS 2019 (PowerSGD)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everyrank.layout import Layout
from everyrank.layout.options import CompressOptions
from everyrank.parallel.flat import flatten, write_back
from everyrank.world import World

__all__ = ["ROUNDED", "Factors", "apply_compression", "initial_factors", "orthonormalise"]

ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype to which gradients are rounded, by the value of `compress`."""
_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13


@dataclass
class Factors:
    """The state of PowerSGD for a matrix (n, m) between updates, with r = matrix_rank.

    q       (m, r), the same on every rank
    error   (n, m), the accumulated approximation error of this rank
    """

    q: Tensor
    error: Tensor


def apply_compression(
    ddp: DistributedDataParallel, model: nn.Module, layout: Layout, world: World
) -> Callable[[], None] | None:
    """Register the layout's gradient compression on `ddp`. Returns a function that clears its state; None without.

    The count of loss terms is not compressed. The hook waits for its collectives, so they do not overlap with backward.
    """
    options = layout.read(CompressOptions)
    if options.compress == "none":
        return None
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    factors_of: dict[nn.Parameter, Factors | None] = {}

    def hook(_, bucket):  # pyright: ignore  (torch rejects string annotations here)
        whole: list[Tensor] = []  # tensors that are sent uncompressed
        rounded: list[Tensor] = []
        matrices: list[tuple[Tensor, Factors]] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in numbers and options.compress in ROUNDED:
                rounded.append(gradient)
                continue
            if parameter in numbers and parameter not in factors_of:
                factors_of[parameter] = initial_factors(parameter, options.matrix_rank, numbers[parameter])
            factors = factors_of.get(parameter)
            if factors is None:
                whole.append(gradient)
            else:
                matrices.append((gradient, factors))
        if rounded:
            _mean_of_rounded_over_ranks(rounded, ROUNDED[options.compress], world)
        if matrices:
            _power_step_over_ranks(matrices, world)
        _average(whole, world)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return factors_of.clear


def _average(tensors: Sequence[Tensor], world: World) -> None:
    """Average each tensor over the ranks, in place, with one all-reduce."""
    if tensors:
        flat = flatten(tensors)
        dist.all_reduce(flat, group=world.group)
        flat /= world.size
        write_back(flat, tensors)


def _mean_of_rounded_over_ranks(gradients: Sequence[Tensor], dtype: torch.dtype, world: World) -> None:
    """Average the rounded gradients over the ranks and round again, in place; an all-to-all and an all-gather."""
    flat = flatten(gradients)
    each = -(-len(flat) // world.size)
    sent = torch.zeros(world.size * each, dtype=dtype, device=flat.device)
    sent[: len(flat)] = flat
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=world.group)
    mean = received.view(world.size, each).to(flat.dtype).sum(0) / world.size
    all_gather: Any = getattr(dist, _NAME)
    all_gather(sent, mean.to(dtype), group=world.group)
    write_back(sent[: len(flat)], gradients)


def initial_factors(parameter: Tensor, matrix_rank: int, number: int) -> Factors | None:
    """Return a random Q that is the same on every rank (`number` is the parameter's index), and an error of zero.

    None for a parameter that is not a matrix or empty, or if both factors have as many elements as the matrix.
    """
    if parameter.dim() < 2 or not parameter.numel():
        return None
    n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
    if (n + m) * matrix_rank >= n * m:
        return None
    q = torch.randn(m, matrix_rank, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return Factors(q.to(parameter.device, parameter.dtype), parameter.detach().new_zeros(n, m))


def _power_step_over_ranks(matrices: Sequence[tuple[Tensor, Factors]], world: World) -> None:
    """One step of PowerSGD on every rank, in place; two all-reduces for all matrices of a bucket."""
    with_error = [gradient.reshape_as(factors.error) + factors.error for gradient, factors in matrices]
    ps = [matrix @ factors.q for matrix, (_, factors) in zip(with_error, matrices, strict=True)]
    _average(ps, world)
    ps = [orthonormalise(p) for p in ps]
    qs = [matrix.T @ p for matrix, p in zip(with_error, ps, strict=True)]
    _average(qs, world)
    for matrix, p, q, (gradient, factors) in zip(with_error, ps, qs, matrices, strict=True):
        mean = p @ q.T
        factors.q, factors.error = q, matrix - mean
        gradient.copy_(mean.view_as(gradient))


def orthonormalise(p: Tensor) -> Tensor:
    """Orthonormalise the columns of p (n, r) by Gram-Schmidt; columns that vanish become zero.

    A linearly dependent column is only rounding error afterwards. Normalised, it would add noise to every gradient.
    """
    columns: list[Tensor] = []
    smallest = torch.finfo(p.dtype).eps * 1e3
    for column in p.unbind(1):
        length = column.norm()
        for other in (*columns, *columns):  # twice is enough (Kahan and Parlett)
            column = column - other * (other @ column)
        left = column.norm()
        is_there = left > smallest * length
        columns.append(torch.where(is_there, column / torch.where(is_there, left, 1.0), 0.0))
    return torch.stack(columns, 1)
