"""Local SGD: each rank trains its replica for some updates, then the replicas are averaged.

Each replica is weighted by the loss terms it has seen since the last average. With an average after every update, plain
SGD then equals training on one device, uneven last batches included. The optimizer state is averaged with the
parameters, so that afterwards all ranks are identical and one checkpoint holds everything.

Source: McMahan et al., AISTATS 2017 (the weights); Yu, Jin and Yang, ICML 2019 (momentum averaged, too)
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.parallel.flat import flatten, write_back
from everyrank.world import SameValue, World

__all__ = ["Averaging", "averaged_state", "check_same_state", "state_names"]


def averaged_state(model: nn.Module, optimizer: Optimizer | None = None) -> list[Tensor]:
    """Return the tensors to average: floating-point parameters, buffers and, with `optimizer`, its state.

    Scalars of the optimizer such as Adam's `step` are not averaged.
    """
    states = _states(optimizer) if optimizer is not None else []
    state = [each[key] for each in states for key in sorted(each) if not _is_number(each[key])]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [*trained, *model.buffers(), *state]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's state of each parameter, in order."""
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _numbers(optimizer: Optimizer) -> list[Tensor]:
    """Return the scalar state of the optimizer for each parameter."""
    return [state[key] for state in _states(optimizer) for key in sorted(state) if _is_number(state[key])]


def check_same_state(names_by_rank: Mapping[int, Sequence[str]], is_everywhere: bool = True) -> None:
    """Raise `WorkloadError` if some replica has not stepped a parameter yet: different tensors would be averaged.

    names_by_rank   the `state_names` of each rank
    is_everywhere   all ranks raise, so the error is an `UnsupportedLayoutError`
    """
    all_names = [name for names in names_by_rank.values() for name in names if name]
    for name in all_names:
        without = [str(rank) for rank, names in names_by_rank.items() if name not in names]
        if without:
            raise (UnsupportedLayoutError if is_everywhere else WorkloadError)(
                f"layout local_sgd: the optimizer's {name} does not exist on rank {without[0]}, where this parameter "
                "has not been in a loss with terms yet; use ddp:find_unused=true, or an optimizer without state"
            )


def state_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the tensors in the optimizer's state, for example `exp_avg of head.weight`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        f"{key} of {names[parameter]}"
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


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
        self.state_names = SameValue(world)

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
        """Average the replicas in place. A collective. Raises `WorkloadError` for replicas with different state."""
        values, is_everywhere = self.state_names.differences("\n".join(state_names(self.model, self.optimizer)))
        check_same_state({rank: values[rank].split("\n") for rank in sorted(values)}, is_everywhere)
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
