"""SyncBatchNorm where CUDA is pretended: torch's own refuses the CPU; this has its statistics over the ranks, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

__all__ = ["install_sync_batch_norm"]


def install_sync_batch_norm() -> None:
    """From now on SyncBatchNorm runs on CPU, also inside DistributedDataParallel."""
    kind: Any = torch.nn.SyncBatchNorm
    kind.forward = _forward
    wrapper: Any = DistributedDataParallel
    wrapper._passing_sync_batchnorm_handle = lambda *_: None  # it refuses the CPU


def _forward(self: Any, values: Any) -> Any:
    """The same mathematics: mean and variance of all ranks' samples, and gradients through both."""
    over_ranks = dist.is_initialized() and dist.get_world_size(self.process_group) > 1
    if not (over_ranks and self.training):
        is_batch = self.training or self.running_mean is None
        momentum = self.momentum if self.momentum is not None else 0.1
        return F.batch_norm(
            values, self.running_mean, self.running_var, self.weight, self.bias, is_batch, momentum, self.eps
        )
    wide, channels = values.double(), values.shape[1]
    dims = [dim for dim in range(values.dim()) if dim != 1]
    own = torch.cat([wide.sum(dims), wide.square().sum(dims), wide.new_tensor([values.numel() / channels])])
    total = _Sum.apply(own, self.process_group)
    mean, count = total[:channels] / total[-1], total[-1]
    variance = total[channels:-1] / count - mean.square()
    shape = [1, channels, *[1] * (values.dim() - 2)]
    out = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        out = out * self.weight.view(shape) + self.bias.view(shape)
    if self.track_running_stats:
        _move(self, mean.detach(), (variance * count / (count - 1)).detach())
    return out.to(values.dtype)


class _Sum(torch.autograd.Function):
    """Over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: Any) -> Any:
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        total = grad_outputs[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _move(self: Any, mean: Any, unbiased: Any) -> None:
    self.num_batches_tracked.add_(1)
    momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
    for held, new in ((self.running_mean, mean), (self.running_var, unbiased)):
        held.lerp_(new.to(held.dtype), momentum)
