"""Replicas that go their own ways for some updates, and then meet in the mean of where they are.

Each counts for as much as the loss terms that it has seen since the last mean: where every update is averaged, plain
SGD is then that of one device, ragged batches too. The optimizer's state is averaged with the parameters, so that after
it all ranks hold the same, and a checkpoint is one.

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
    """What replicas average: trained parameters, buffers and the optimizer's state, floating-point tensors of them.

    Not the numbers that an optimizer keeps in tensors without dimensions (Adam's `step`).
    """
    state: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own: dict[str, Any] = optimizer.state.get(parameter, {})
            state += [own[key] for key in sorted(own) if not _is_number(own[key])]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [*trained, *model.buffers(), *state]
    return [one for one in found if isinstance(one, Tensor) and one.is_floating_point()]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _numbers(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer counts, for each parameter."""
    own = [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]
    return [state[key] for state in own for key in sorted(state) if _is_number(state[key])]


class Averaging:
    """When the replicas of a model meet, and how.

    every         updates from one mean to the next
    num_updates   done since the last one
    num_terms     loss terms that this rank has seen since, float64, shape ()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, every: int, world: World) -> None:
        self.model, self.optimizer, self.every, self.world = model, optimizer, every, world
        self.num_updates = 0
        self.num_terms = torch.zeros((), dtype=torch.float64, device=world.device)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same now."""
        return self.num_updates == 0

    def begin_anew(self) -> None:
        """All ranks hold the same: nothing was done since."""
        self.num_updates = 0
        self.num_terms.zero_()

    def after_update(self, num_terms: Tensor) -> None:
        """An update is done that counted so many terms here. Every so many of them a collective."""
        self.num_updates += 1
        self.num_terms += num_terms
        if self.num_updates == self.every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Let all ranks have the mean of what they hold. A collective."""
        state, numbers = averaged_state(self.model, self.optimizer), _numbers(self.optimizer)
        _average(state, self.num_terms, self.world, numbers)
        # what has no mean is rank 0's: steps that the optimizer has counted, batches that batch norm has
        for buffer in self.model.buffers():
            if not buffer.is_floating_point() and self.world.size > 1:
                dist.broadcast(buffer, src=0, group=self.world.group)
        self.begin_anew()

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Generator[None]:
        """While the model has the mean of all replicas; then each its own again. A collective."""
        if self.are_equal:
            yield
            return
        own = [*self.model.parameters(), *self.model.buffers()]
        before = [tensor.clone() for tensor in own]
        _average([tensor for tensor in own if tensor.is_floating_point()], self.num_terms, self.world)
        try:
            yield
        finally:
            for tensor, kept in zip(own, before, strict=True):
                tensor.copy_(kept)


def _average(tensors: list[Tensor], weight: Tensor, world: World, numbers: Sequence[Tensor] = ()) -> None:
    """The weighted mean of each tensor over ranks, and rank 0's `numbers`, in place; one all-reduce for each dtype."""
    if world.size == 1 or world.group is None:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in (*tensors, *numbers)):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = flatten([*own, torch.ones(1, dtype=dtype, device=world.device)])
        flat *= weight.to(dtype)
        counted = [number for number in numbers if number.dtype == dtype]
        if counted:  # they may lie on the CPU beside parameters of a GPU; the other ranks add nothing to rank 0's
            counts = torch.stack(counted).to(world.device)
            flat = torch.cat([counts if world.rank == 0 else torch.zeros_like(counts), flat])
        dist.all_reduce(flat, group=world.group)
        counts, means = flat[: len(counted)], flat[len(counted) :]
        means /= means[-1].clone()
        write_back(means[:-1], own)
        for number, count in zip(counted, counts, strict=True):
            number.copy_(count)
