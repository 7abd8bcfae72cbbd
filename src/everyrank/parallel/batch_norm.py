"""Synchronised batch norm over one micro-batch of all ranks, on CPU as well as CUDA.

torch.nn.SyncBatchNorm raises on CPU tensors. This implementation is equivalent and uses one gather in forward and one
all-reduce in backward. A dummy sample (see data.Batch) does not count in the statistics.

Source: Ioffe and Szegedy 2015; the pairwise combination of variances is Chan, Golub and LeVeque 1979.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from everyrank.errors import WorkloadError
from everyrank.parallel.micro_batch import MicroBatchState
from everyrank.world import World

__all__ = [
    "apply_batch_norm",
    "broadcast_statistics",
    "find_batch_norms",
    "has_batch_norm",
    "refuse_batch_of_one",
    "statistics_of",
]


_KINDS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BACKWARD: Any = torch.ops.aten.native_batch_norm_backward.default  # the kernel that autograd calls


def find_batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norm modules of the model, in order; also after `apply_batch_norm`."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]  # pyright: ignore[reportPrivateUsage]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch statistics; also true after `apply_batch_norm`."""
    return bool(find_batch_norms(model))


def apply_batch_norm(model: nn.Module, state: MicroBatchState, world: World) -> None:
    """Make every batch norm of the model compute its statistics over all ranks. State dict keys do not change.

    Each module stays an instance of its class: an optimizer may choose its parameters by `isinstance`. Raises
    `WorkloadError` for a class of its own, which may compute something else.
    """
    for module in find_batch_norms(model):
        if type(module) not in _KINDS:
            raise WorkloadError(
                f"{type(module).__name__} is a batch norm of its own kind, which everyrank cannot synchronise over "
                "ranks; use torch's BatchNorm, or a norm whose statistics do not span samples"
            )
        module.__class__ = _synchronised(type(module))
        module.everyrank = (state, world)  # type: ignore[assignment]


@functools.cache
def _synchronised(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a batch norm class that computes the statistics over all ranks."""
    return type(kind.__name__, (_SynchronisedBatchNorm, kind), {})


def statistics_of(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of every batch norm as bytes: views for a single broadcast."""
    buffers = [buffer for module in find_batch_norms(model) for buffer in module.buffers(recurse=False)]
    return [buffer.view(-1).view(torch.uint8) for buffer in buffers]


def broadcast_statistics(statistics: list[Tensor], world: World) -> None:
    """Broadcast the running statistics of rank 0, as DistributedDataParallel does by default. A collective."""
    if world.size == 1 or world.group is None or not statistics:
        return
    with torch.no_grad():
        flat = torch.cat(statistics)
        dist.broadcast(flat, src=0, group=world.group)
        if world.rank:
            torch._foreach_copy_(statistics, flat.split([tensor.numel() for tensor in statistics]))  # pyright: ignore[reportPrivateUsage]


@contextlib.contextmanager
def refuse_batch_of_one(model: nn.Module, message: str) -> Generator[None]:
    """In the first forward, refuse batch norm over one value per sample if some micro-batch has only one sample.

    Without this check training would fail after an epoch, or give NaN. `message` names the update. Raises
    `WorkloadError` on every rank.
    """

    def check(module: nn.Module, values: tuple[Any, ...]) -> None:
        shape = values[0].shape if values and isinstance(values[0], Tensor) else ()
        if module.training and math.prod(shape[2:]) == 1:
            raise WorkloadError(f"batch norm over 1 value per channel: {message}")

    hooks = [module.register_forward_pre_hook(check) for module in find_batch_norms(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
    everyrank: tuple[MicroBatchState, World]

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    @torch.compiler.disable  # collectives inside an autograd function: the compiler breaks the graph here anyway
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.training and self.running_mean is not None:
            return self._with_running_statistics(input)
        self._check_input_dim(input)
        state, world = self.everyrank
        if state.is_padding and world.size == 1:  # only a dummy sample: no statistics, and the output does not count
            return self._with_running_statistics(input) if self.running_mean is not None else input
        has_variance = input.numel() > input.shape[1]  # one value has no variance, and is refused below
        if world.size == 1 and self.momentum is not None and has_variance:
            moves_statistics = self.track_running_stats and not state.is_recomputing
            return self._normalise_locally(input, moves_statistics)
        output, mean, unbiased = _Normalise.apply(input, self.weight, self.bias, self.eps, world, state.is_padding)
        if self.training and self.track_running_stats and not state.is_recomputing:
            self.update_running_stats(mean, unbiased)
        return output

    def _normalise_locally(self, values: Tensor, moves_statistics: bool) -> Tensor:
        """Normalise over the local samples with torch's own kernel, which is faster than the operators below."""
        mean, variance, seen = self.running_mean, self.running_var, self.num_batches_tracked
        weight, bias = self.weight, self.bias
        if mean is not None:  # in the dtype of the statistics: torch refuses mixed dtypes
            weight, bias = _in(mean.dtype, weight), _in(mean.dtype, bias)
        if not moves_statistics:  # update copies: checkpoint() raises if recomputation saves fewer tensors
            mean, variance = (None if tensor is None else tensor.clone() for tensor in (mean, variance))
        elif seen is not None:
            seen.add_(1)
        momentum = self.momentum if self.momentum is not None else 0.0
        return F.batch_norm(values, mean, variance, weight, bias, training=True, momentum=momentum, eps=self.eps)

    def _with_running_statistics(self, values: Tensor) -> Tensor:
        """Normalise in evaluation. The statistics stay float32 in a model of lower precision, but torch refuses mixed
        dtypes.
        """
        assert self.running_mean is not None
        wide = self.running_mean.dtype
        weight, bias = _in(wide, self.weight), _in(wide, self.bias)
        output = F.batch_norm(values.to(wide), self.running_mean, self.running_var, weight, bias, eps=self.eps)
        return output.to(values.dtype)

    def update_running_stats(self, mean: Tensor, unbiased: Tensor) -> None:
        """Update the running statistics, with the unbiased variance."""
        running_mean, running_variance, seen = self.running_mean, self.running_var, self.num_batches_tracked
        assert running_mean is not None
        assert running_variance is not None
        assert seen is not None
        seen.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / seen.to(running_mean.dtype)
        running_mean.lerp_(_in(running_mean.dtype, mean), momentum)
        running_variance.lerp_(_in(running_variance.dtype, unbiased), momentum)


class _Normalise(torch.autograd.Function):
    """input (N, C, ...) -> output of the same shape, and the mean and unbiased variance (C,) it was normalised by."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        world: World,
        is_padding: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
        over = [dim for dim in range(wide.dim()) if dim != 1]
        along = [1, -1] + [1] * (wide.dim() - 2)  # reshapes (C,) to broadcast along dimension 1
        size = wide.numel() / wide.shape[1]
        mean = wide.mean(over)
        # torch.var_mean takes ten times as long on CPU
        squares = (wide - mean.view(along)).square_().sum(over)
        # a dummy sample has a count of zero, and its squares must not count either
        mean, variance, total = _over_ranks(mean, squares, size, is_padding, world)
        if isinstance(total, float) and total <= 1 and world.size == 1:
            raise WorkloadError(
                "batch norm over 1 value per channel: this rank has one sample of the micro-batch; use batch_norm=sync "
                "where it is local, fewer processes or a larger global_batch"
            )
        if isinstance(total, float) and total <= 1:
            raise ValueError(
                f"batch norm over {int(total)} value per channel: the micro-batch over all ranks is too small"
            )
        # the kernel of evaluation mode, which normalises by given statistics; its backward is below
        output = F.batch_norm(wide, mean, variance, _in(wide.dtype, weight), _in(wide.dtype, bias), eps=eps)
        ctx.save_for_backward(wide, mean, variance, weight)
        ctx.world, ctx.eps, ctx.total, ctx.is_padding = world, eps, total, is_padding
        # one value over all ranks has no variance either; on CUDA it is not an error
        others = torch.clamp(total - 1, min=1) if isinstance(total, Tensor) else total - 1
        unbiased = variance * (total / others)
        ctx.mark_non_differentiable(mean, unbiased)
        return _in(values.dtype, output), mean, unbiased

    @staticmethod
    @once_differentiable  # a second derivative would lack the contributions of other ranks
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad: Tensor = grads[0]
        wide, mean, variance, weight = ctx.saved_tensors
        factor = _in(wide.dtype, weight)
        # first with constant statistics; then the gradient through the statistics, from the values of all ranks
        input_grad, weight_grad, bias_grad = _BACKWARD(
            _in(wide.dtype, grad), wide, factor, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        shared = torch.stack([weight_grad, bias_grad])
        if ctx.world.size > 1:
            dist.all_reduce(shared, group=ctx.world.group)
        if not ctx.is_padding:  # a dummy sample is not part of the mean
            scale = (variance + ctx.eps).rsqrt_().div_(ctx.total)
            from_variance, from_mean = (shared * (scale if factor is None else scale * factor)).unbind()
            input_grad -= F.batch_norm(wide, mean, variance, from_variance, from_mean, eps=ctx.eps)
        if weight is None:
            weight_grad = bias_grad = None
        else:
            weight_grad, bias_grad = _in(weight.dtype, weight_grad), _in(weight.dtype, bias_grad)
        return _in(grad.dtype, input_grad), weight_grad, bias_grad, None, None, None


def _over_ranks(
    mean: Tensor, squares: Tensor, size: float, is_padding: bool, world: World
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Combine this rank's mean (C,), sum of squares (C,) and count into mean, variance and count over all ranks.

    On CUDA the count stays a tensor, because reading it would synchronise the device.
    """
    if world.size == 1:
        return mean, squares / size, size
    local_sums = torch.cat([mean, squares, mean.new_full((1,), size)])
    if is_padding:
        local_sums[len(mean) :] = 0
    rows = local_sums.new_empty(world.size, len(local_sums))
    dist.all_gather(list(rows.unbind()), local_sums, group=world.group)
    means, squares, counts = rows.split_with_sizes([len(mean), len(mean), 1], 1)
    total = counts.sum()
    number: float | Tensor = total.item() if total.device.type == "cpu" else total
    mean = (means * counts).sum(0) / number
    return mean, torch.addcmul(squares, counts, (means - mean).square_()).sum(0) / number, number


@overload
def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor: ...
@overload
def _in(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None: ...
def _in(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    """Cast a tensor if needed; None stays None. The comparison is cheaper than a cast that does nothing."""
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
