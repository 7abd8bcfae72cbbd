"""Batch norm whose statistics span one micro-batch over all ranks, on CPU as well as CUDA.

torch.nn.SyncBatchNorm raises on CPU tensors; this one is the same mathematics written with one gather forward and
one all-reduce backward. A borrowed sample (see data.Batch) takes no part in the statistics.

Source: Ioffe and Szegedy 2015; the pairwise combination of variances is Chan, Golub and LeVeque 1979.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from everyrank.errors import WorkloadError
from everyrank.world import World

__all__ = ["ForwardState", "find_batch_norms", "synchronise_batch_norm"]


@dataclass
class ForwardState:
    """What the forward pass in progress must know of its batch."""

    is_borrowed: bool = False
    is_recomputing: bool = False

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """While a block runs its forward again: running statistics have already seen this batch."""
        self.is_recomputing = True
        try:
            yield
        finally:
            self.is_recomputing = False


_KINDS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def find_batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms of the model, in order."""
    return [module for module in model.modules() if isinstance(module, _KINDS)]


def synchronise_batch_norm(model: nn.Module, state: ForwardState, world: World) -> None:
    """Let every batch norm of the model take its statistics over all ranks. State dict keys stay as they are.

    Raises `WorkloadError` for a subclass with a forward of its own, which cannot be known to be the same mathematics.
    """
    for module in find_batch_norms(model):
        if type(module) not in _KINDS:
            raise WorkloadError(
                f"{type(module).__name__} is a batch norm of its own kind, which everyrank cannot synchronise over "
                "ranks; use torch's BatchNorm, or a norm whose statistics do not span samples"
            )
        module.__class__ = _SynchronisedBatchNorm
        module.everyrank = (state, world)  # type: ignore[assignment]


class _SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
    everyrank: tuple[ForwardState, World]

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    @torch.compiler.disable  # collectives inside an autograd function: the compiler breaks the graph here anyway
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.training and self.running_mean is not None:
            return self._with_running_statistics(input)
        self._check_input_dim(input)
        state, world = self.everyrank
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, world, state.is_borrowed
        )
        if self.training and self.track_running_stats and not state.is_recomputing:
            self._follow(mean, variance, count)
        return output

    def _with_running_statistics(self, values: Tensor) -> Tensor:
        """Evaluation. The statistics stay float32 where a sharded model computes in less: torch refuses the mixture."""
        assert self.running_mean is not None
        wide = self.running_mean.dtype
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        output = F.batch_norm(values.to(wide), self.running_mean, self.running_var, weight, bias, eps=self.eps)
        return output.to(values.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics; the running variance is the unbiased one."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """input (N, C, ...) -> output of the same shape, and the statistics (C,), (C,), () they were normalised by."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        world: World,
        borrowed: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        over = [dim for dim in range(wide.dim()) if dim != 1]
        count = wide.new_tensor([0.0 if borrowed else wide.numel() / wide.shape[1]])
        own_mean = wide.mean(over)
        # a borrowed sample has a count of zero, and its squares must not count either
        own_squares = (wide - _along(own_mean, wide)).square().sum(over) * (not borrowed)
        own = torch.cat([own_mean, own_squares, count])
        rows = [own]
        if world.size > 1:
            rows = [torch.empty_like(own) for _ in range(world.size)]
            dist.all_gather(rows, own, group=world.group)
        means, squares, counts = torch.stack(rows).split([len(own_mean), len(own_mean), 1], dim=1)
        total = counts.sum()
        if values.device.type == "cpu" and total <= 1:  # on CUDA looking at it would make the device wait
            raise ValueError(
                f"batch norm over {int(total)} value per channel: the micro-batch over all ranks is too small"
            )
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = (variance + eps).rsqrt()
        normal = (wide - _along(mean, wide)) * _along(inverse, wide)
        output = normal if weight is None else normal * _along(weight.to(wide.dtype), wide)
        output = output if bias is None else output + _along(bias.to(wide.dtype), wide)
        ctx.save_for_backward(normal, inverse, weight, total)
        ctx.world, ctx.over, ctx.borrowed, ctx.bias_dtype = (
            world,
            over,
            borrowed,
            bias.dtype if bias is not None else None,
        )
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(values.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad: Tensor = grads[0]
        normal, inverse, weight, total = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        sums = torch.stack([wide.sum(ctx.over), (wide * normal).sum(ctx.over)])
        weight_grad = sums[1].to(weight.dtype) if weight is not None else None
        bias_grad = sums[0].to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        shared = sums.clone()
        if ctx.world.size > 1:
            dist.all_reduce(shared, group=ctx.world.group)
        if not ctx.borrowed:  # a borrowed sample is not part of the mean it was normalised by
            wide = wide - _along(shared[0] / total, wide) - normal * _along(shared[1] / total, wide)
        scale = inverse if weight is None else inverse * weight.to(wide.dtype)
        return (wide * _along(scale, wide)).to(grad.dtype), weight_grad, bias_grad, None, None, None


def _along(channels: Tensor, values: Tensor) -> Tensor:
    """(C,) made to broadcast along dimension 1 of `values`."""
    return channels.reshape(1, -1, *[1] * (values.dim() - 2))
