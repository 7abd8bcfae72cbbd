"""Tensors that are not contiguous: whether each operation takes them, refuses them, or is wrong without a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from everyrank.collectives.operations import OPERATIONS, Case
from everyrank.collectives.options import CommOptions
from everyrank.collectives.sweep import TORCH_DTYPES, refusal
from everyrank.world import World
from everyrank.world.collectives import all_gather

__all__ = ["MEMORY", "StridesRow", "check_strides"]

MEMORY = ("strided", "transposed")
"""strided: every other element of what lies in memory. transposed: all of it, in the order of columns."""
_TAKE_ALL = ("shm", "mpi")
_LENGTH = 6  # elements for each part that a rank has


@dataclass(frozen=True)
class StridesRow:
    """One operation with inputs and outputs that are not contiguous, called once, not timed.

    backend, operation
    memory       out of `MEMORY`; the same on all ranks
    refused      what the backend, or torch before it, says that does not take such tensors
    num_wrong    else the elements that are not the right answer, over all ranks
    is_failure   whether that is a failure of the backend

    torch promises such tensors for no backend: gloo refuses some, and gets others wrong without a word. That is said,
    and is no failure: a person has to know of it, and can do nothing about it but to call `.contiguous()`. `shm` and
    `mpi` of ours say that they take every tensor: there, a wrong element or a refusal is a failure like any other.
    """

    backend: str
    operation: str
    memory: str
    refused: str | None
    num_wrong: int
    is_failure: bool


def check_strides(world: World, groups: Mapping[str, dist.ProcessGroup], options: CommOptions) -> list[StridesRow]:
    """Of each backend, each operation that carries tensors, and each `MEMORY`; the same on all ranks. A collective."""
    rows: list[StridesRow] = []
    for backend, group in groups.items():
        for memory in MEMORY:
            for name in options.asked_operations:
                operation, size = OPERATIONS[name], dist.get_world_size(group)
                if not operation.has_tensors or size < operation.least_ranks:
                    continue
                case = Case(
                    dist.get_rank(group),
                    size,
                    group,
                    _LENGTH * operation.multiple(size),
                    TORCH_DTYPES[options.dtype],
                    world.device,
                    options.reduction,
                    is_async=options.is_async and operation.has_async,
                    memory=memory,
                )
                call = operation.make(case)
                refused = refusal(world, call)
                wrong = torch.tensor([call.wrong() if refused is None else 0])
                num_wrong = int(torch.stack(all_gather(wrong, world)).sum())
                is_failure = backend in _TAKE_ALL and (refused is not None or num_wrong > 0)
                rows.append(StridesRow(backend, name, memory, refused, num_wrong, is_failure))
    return rows
