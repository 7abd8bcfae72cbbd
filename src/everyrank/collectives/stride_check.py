"""Tests whether operations accept non-contiguous tensors, refuse them, or return wrong results without an error."""

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

__all__ = ["MEMORY_LAYOUTS", "StridesRow", "check_strides"]

MEMORY_LAYOUTS = ("strided", "transposed")
"""strided: every second element in memory. transposed: all elements, in column order."""
_SUPPORT_STRIDES = ("shm", "mpi")
_LENGTH = 6  # elements of each tensor, times the number of parts that the operation divides it into


@dataclass(frozen=True)
class StridesRow:
    """The result of one call of an operation with non-contiguous input and output.

    backend, operation
    memory       a name in `MEMORY_LAYOUTS`; the same on all ranks
    refused      the error message of the backend or torch; None if it accepted the tensors
    num_wrong    number of wrong elements over all ranks
    is_failure   whether the result is a failure of the backend

    torch does not promise support for such tensors: gloo refuses some and returns wrong results for others. That is
    reported, but is not a failure; call `.contiguous()`. Our `shm` and `mpi` support all tensors, so there a wrong
    element or a refusal is a failure.
    """

    backend: str
    operation: str
    memory: str
    refused: str | None
    num_wrong: int
    is_failure: bool


def check_strides(world: World, groups: Mapping[str, dist.ProcessGroup], options: CommOptions) -> list[StridesRow]:
    """Test each operation that has tensors, on each backend and with each memory layout.

    Returns the same rows on all ranks. A collective.
    """
    rows: list[StridesRow] = []
    for backend, group in groups.items():
        for memory in MEMORY_LAYOUTS:
            for name in options.tested_operations:
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
                is_failure = backend in _SUPPORT_STRIDES and (refused is not None or num_wrong > 0)
                rows.append(StridesRow(backend, name, memory, refused, num_wrong, is_failure))
    return rows
