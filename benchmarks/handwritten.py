"""Training loops in plain PyTorch, without everyrank, for overhead.py to compare.

same_arithmetic    equivalent to everyrank's `ddp`: global count of terms, synchronized batch norm, each sample once
plain              the same on one process, without DDP
conventional       what most scripts do: DistributedSampler, mean over local samples, batch norm of each rank

All loops are generators that yield after each update.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# torch 2.13 renamed broadcast_buffers and warns about the old name
HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if HAS_NEW_NAME else "broadcast_buffers": False}

KEPT_LOSSES = 20

Job = Any  # an everyrank.Workload; only its model, data, loss and optimizer are used


class GlobalBatches:
    """A batch sampler that yields the indices of this rank in each global batch.

    The ranks get the same number of samples, up to one. Each iteration is an epoch in a new order.
    """

    def __init__(self, length: int, global_batch: int, seed: int, rank: int, size: int) -> None:
        self.length, self.global_batch, self.seed, self.rank, self.size = length, global_batch, seed, rank, size
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        self.epoch += 1
        for start in range(0, self.length, self.global_batch):
            batch = order[start : start + self.global_batch]
            samples_per_rank, remainder = divmod(len(batch), self.size)
            begin = self.rank * samples_per_rank + min(self.rank, remainder)
            yield batch[begin : begin + samples_per_rank + (self.rank < remainder)]


class WithCarrier(nn.Module):
    """A model with a `carrier` parameter of two elements, whose gradient is the (sum, count) of the loss.

    DDP averages it in the bucket of the gradients, so (sum, count) need no collective of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.carrier = nn.Parameter(torch.zeros(2))

    def forward(self, value: Any) -> tuple[Any, Tensor]:
        output = self.model(**value) if isinstance(value, dict) else self.model(value)
        return output, self.carrier * 1.0


def same_arithmetic(job: Job, losses: list[float]) -> Iterator[None]:
    """Run DDP with the arithmetic of one device. `losses` gets the losses of the first updates."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(job.seed)
    model = synchronize_batch_norm(job.model()).train()
    ddp = DistributedDataParallel(WithCarrier(model), **NO_BUFFER_SYNC) if size > 1 else WithCarrier(model)
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    parameters = list(model.parameters())
    dataset = job.train_data()
    loader = DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), job.global_batch, job.seed, rank, size))
    carrier = (ddp.module if size > 1 else ddp).carrier
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            carrier.grad = None
            output, zeros = ddp(value)
            total, count = job.loss(output, target)
            sum_and_count = torch.tensor([total.detach(), count])
            (total / job.global_batch + (zeros * sum_and_count).sum()).backward()
            global_sum, global_count = (carrier.grad * size).tolist()
            factor = size * job.global_batch / global_count  # turns DDP's mean into the mean over all terms
            gradients = [p.grad for p in parameters]
            if job.clip_norm is not None:
                norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
                factor *= min(1.0, job.clip_norm / (norm + 1e-6))
            torch._foreach_mul_(gradients, factor)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if len(losses) < KEPT_LOSSES:
                losses.append(global_sum / global_count)
            yield


def plain(job: Job, losses: list[float]) -> Iterator[None]:
    """Run the same arithmetic on one process, without DDP."""
    torch.manual_seed(job.seed)
    model = job.model().train()
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    parameters = list(model.parameters())
    dataset = job.train_data()
    loader = DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), job.global_batch, job.seed, 0, 1))
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            output = model(**value) if isinstance(value, dict) else model(value)
            total, count = job.loss(output, target)
            loss = total / count
            loss.backward()
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if len(losses) < KEPT_LOSSES:
                losses.append(float(loss.detach()))
            yield


def conventional(job: Job, losses: list[float], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run DDP as most scripts do. `group` is the process group of DDP; None for the default group."""
    size = dist.get_world_size()
    torch.manual_seed(job.seed)
    model = job.model().train()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    dataset = job.train_data()
    sampler = DistributedSampler(dataset, seed=job.seed)
    loader = DataLoader(dataset, batch_size=job.global_batch // size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for value, target in loader:
            optimizer.zero_grad()
            output = ddp(**value) if isinstance(value, dict) else ddp(value)
            total, count = job.loss(output, target)
            loss = total / count
            loss.backward()
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if len(losses) < KEPT_LOSSES:
                losses.append(float(loss.detach()))
            yield


def synchronize_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d of `model` by one with statistics over all ranks, and return `model`."""
    if dist.get_world_size() > 1:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = GlobalBatchNorm2d
    return model


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with statistics over all ranks, because torch.nn.SyncBatchNorm needs CUDA.

    It runs one all-gather in the forward and one all-reduce in the backward.
    """

    def forward(self, value: Tensor) -> Tensor:
        output, mean, variance, count = _Normalize.apply(value, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return output


class _Normalize(torch.autograd.Function):
    """Normalize over the samples of all ranks. Returns (output, mean, variance, count)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        channels = value.shape[1]
        mean = value.mean((0, 2, 3))
        squares = (value - mean.view(1, -1, 1, 1)).square().sum((0, 2, 3))
        local_stats = torch.cat([mean, squares, mean.new_tensor([value.numel() / channels])])
        all_stats = local_stats.new_empty(dist.get_world_size(), len(local_stats))
        dist.all_gather(list(all_stats), local_stats)
        means, squares, counts = all_stats.split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normalized = (value - mean.view(1, -1, 1, 1)) * inverse.view(1, -1, 1, 1)
        ctx.save_for_backward(normalized, inverse, weight, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normalized, inverse, weight, count = ctx.saved_tensors
        local_sums = torch.stack([grad.sum((0, 2, 3)), (grad * normalized).sum((0, 2, 3))])
        means = local_sums.clone()
        dist.all_reduce(means)
        means = (means / count).view(2, 1, -1, 1, 1)
        scale = (inverse * weight).view(1, -1, 1, 1)
        return (grad - means[0] - normalized * means[1]) * scale, local_sums[1], local_sums[0], None
