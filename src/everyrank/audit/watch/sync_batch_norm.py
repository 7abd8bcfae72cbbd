"""SyncBatchNorm on pretended GPUs, because torch's own does not run on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

__all__ = ["install_sync_batch_norm"]


def install_sync_batch_norm() -> None:
    """Let SyncBatchNorm run on the CPU, also inside DistributedDataParallel."""
    kind: Any = torch.nn.SyncBatchNorm
    kind.forward = _forward
    wrapper: Any = DistributedDataParallel
    wrapper._passing_sync_batchnorm_handle = lambda *_: None  # it raises on the CPU


def _forward(self: Any, values: Any) -> Any:
    """Normalise with mean and variance over the samples of all ranks, with gradients through both."""
    over_ranks = dist.is_initialized() and dist.get_world_size(self.process_group) > 1
    if not (over_ranks and self.training):
        is_batch = self.training or self.running_mean is None
        momentum = self.momentum if self.momentum is not None else 0.1
        return F.batch_norm(
            values, self.running_mean, self.running_var, self.weight, self.bias, is_batch, momentum, self.eps
        )
    values64, channels = values.double(), values.shape[1]
    dims = [dim for dim in range(values.dim()) if dim != 1]
    local_sums = torch.cat(
        [values64.sum(dims), values64.square().sum(dims), values64.new_tensor([values.numel() / channels])]
    )
    total = _Sum.apply(local_sums, self.process_group)
    mean, count = total[:channels] / total[-1], total[-1]
    variance = total[channels:-1] / count - mean.square()
    shape = [1, channels, *[1] * (values.dim() - 2)]
    out = (values64 - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        out = out * self.weight.view(shape) + self.bias.view(shape)
    if self.track_running_stats:
        _update_statistics(self, mean.detach(), (variance * count / (count - 1)).detach())
    return out.to(values.dtype)


class _Sum(torch.autograd.Function):
    """An all-reduce (sum) in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, local: Any, group: Any) -> Any:
        ctx.group = group
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        total = grad_outputs[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _update_statistics(self: Any, mean: Any, unbiased: Any) -> None:
    self.num_batches_tracked.add_(1)
    momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
    for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
        running.lerp_(new.to(running.dtype), momentum)
