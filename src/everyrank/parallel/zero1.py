"""ZeRO-1: every rank owns a part of the optimizer, updates those parameters and broadcasts them.

torch's ZeroRedundancyOptimizer builds its optimizer from a class. A workload has a function that builds one, so here
the user's optimizer is built over all parameters and then pruned to those that this rank owns.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from everyrank.parallel.flat import buckets, flatten, write_back
from everyrank.world import World

__all__ = ["assign_owners", "broadcast_from_owners", "keep_owned_parameters"]

_HELD_BYTES = 64 << 20  # of copies being sent: enough to keep the links busy


def assign_owners(parameters: list[nn.Parameter], count: int) -> list[int]:
    """Assign each parameter to a rank: the largest first, each to the rank with the fewest elements so far."""
    load = [0] * count
    owners = [0] * len(parameters)
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].numel()):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += parameters[index].numel()
    return owners


def keep_owned_parameters(optimizer: Optimizer, owned: set[nn.Parameter]) -> None:
    """Keep only `owned` parameters in the optimizer; its groups stay, so schedules keep working."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in owned]
    for parameter in list(optimizer.state):  # some optimizers fill it before the first step
        if parameter not in owned:
            del optimizer.state[parameter]


@torch.no_grad()
def broadcast_from_owners(
    parameters: list[nn.Parameter], owners: list[int], world: World, held_bytes: int = _HELD_BYTES
) -> None:
    """Broadcast updated parameters from their owners, one broadcast per owner and dtype.

    Copies are sent. At most `held_bytes` of copies exist at a time (or one larger parameter): an owner of more sends
    several broadcasts, and the first are written back before the last are made.
    """
    waiting: deque[tuple[dist.Work | None, Tensor, list[Tensor]]] = deque()

    def write_first_back() -> None:
        work, flat, tensors = waiting.popleft()
        if work is not None:
            work.wait()
        write_back(flat, tensors)

    for owner in range(world.size):
        owned = [
            parameter for parameter, parameter_owner in zip(parameters, owners, strict=True) if parameter_owner == owner
        ]
        for bucket in buckets(owned, held_bytes // 2):
            while (
                waiting
                and sum(flat.nbytes for _, flat, _ in waiting) + sum(tensor.nbytes for tensor in bucket) > held_bytes
            ):
                write_first_back()
            flat = flatten(bucket)
            waiting.append((dist.broadcast(flat, src=owner, group=world.group, async_op=True), flat, bucket))
    while waiting:
        write_first_back()
