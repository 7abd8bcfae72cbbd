"""Local SGD: each rank trains its replica for some updates, then the replicas are averaged.

Each replica is weighted by the loss terms it has seen since the last average. With an average after every update, plain
SGD then equals training on one device, uneven last batches included. The optimizer state is averaged with the
parameters, so that afterwards all ranks are identical and one checkpoint holds everything.

Source: McMahan et al., AISTATS 2017 (the weights); Yu, Jin and Yang, ICML 2019 (momentum averaged, too)
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from everyrank.parallel.flat import flatten, write_back
from everyrank.world import World

__all__ = ["Averaging", "averaged_state"]


def averaged_state(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors to average: floating-point parameters, buffers and optimizer state.

    Scalars of the optimizer such as Adam's `step` are not averaged.
    """
    state: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer_state: dict[str, Any] = optimizer.state.get(parameter, {})
            state += [optimizer_state[key] for key in sorted(optimizer_state) if not _is_number(optimizer_state[key])]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [*trained, *model.buffers(), *state]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _numbers(optimizer: Optimizer) -> list[Tensor]:
    """Return the scalar state of the optimizer for each parameter."""
    states = [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]
    return [state[key] for state in states for key in sorted(state) if _is_number(state[key])]


class Averaging:
    """The schedule and the averaging of replicas.

    every         updates between two averages
    num_updates   updates since the last average
    num_terms     loss terms of this rank since the last average, float64, shape ()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, every: int, world: World) -> None:
        self.model, self.optimizer, self.every, self.world = model, optimizer, every, world
        self.num_updates = 0
        self.num_terms = torch.zeros((), dtype=torch.float64, device=world.device)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold identical replicas now."""
        return self.num_updates == 0

    def reset_counts(self) -> None:
        """Reset the counts, because all ranks hold identical replicas."""
        self.num_updates = 0
        self.num_terms.zero_()

    def after_update(self, num_terms: Tensor) -> None:
        """Count an update with so many local loss terms, and average after every `every` updates. Then it is a
        collective.
        """
        self.num_updates += 1
        self.num_terms += num_terms
        if self.num_updates == self.every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average the replicas in place. A collective."""
        state, numbers = averaged_state(self.model, self.optimizer), _numbers(self.optimizer)
        _average(state, self.num_terms, self.world, numbers)
        # rank 0 broadcasts integer state: step counts of the optimizer, batch counts of batch norm
        for buffer in self.model.buffers():
            if not buffer.is_floating_point() and self.world.size > 1:
                dist.broadcast(buffer, src=0, group=self.world.group)
        self.reset_counts()

    @contextlib.contextmanager
    @torch.no_grad()
    def averaged_weights(self) -> Generator[None]:
        """Swap in the average of all replicas for the block, then restore each. A collective."""
        if self.are_equal:
            yield
            return
        tensors = [*self.model.parameters(), *self.model.buffers()]
        before = [tensor.clone() for tensor in tensors]
        _average([tensor for tensor in tensors if tensor.is_floating_point()], self.num_terms, self.world)
        try:
            yield
        finally:
            for tensor, saved in zip(tensors, before, strict=True):
                tensor.copy_(saved)


def _average(tensors: list[Tensor], weight: Tensor, world: World, numbers: Sequence[Tensor] = ()) -> None:
    """Weighted mean of each tensor over the ranks, and rank 0's `numbers`, in place; one all-reduce per dtype."""
    if world.size == 1 or world.group is None:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in (*tensors, *numbers)):
        same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = flatten([*same_dtype, torch.ones(1, dtype=dtype, device=world.device)])
        flat *= weight.to(dtype)
        counted = [number for number in numbers if number.dtype == dtype]
        if counted:  # they may be on the CPU next to CUDA parameters; the other ranks add zero
            counts = torch.stack(counted).to(world.device)
            flat = torch.cat([counts if world.rank == 0 else torch.zeros_like(counts), flat])
        dist.all_reduce(flat, group=world.group)
        counts, means = flat[: len(counted)], flat[len(counted) :]
        means /= means[-1].clone()
        write_back(means[:-1], same_dtype)
        for number, count in zip(counted, counts, strict=True):
            number.copy_(count)
