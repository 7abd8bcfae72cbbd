"""Finds buffers that the ranks hold with different values after the first update.

A layer may write a buffer in forward, for example `InstanceNorm(track_running_stats=True)`. Each rank then computes it
from its own samples, evaluates with its own values, and rank 0's are saved, without an error.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from everyrank.strategies import Prepared
from everyrank.world.collectives import fingerprints_by_rank

__all__ = ["different_buffers"]

_SPLIT_AXES = ("pipeline", "context", "expert", "tensor")  # whose ranks may hold other buffers


def different_buffers(prepared: Prepared) -> list[str]:
    """Return the names of the persistent buffers that are not bitwise identical on all ranks. A collective."""
    mesh, world = prepared.mesh, prepared.world
    is_replicated = mesh.in_lockstep and not mesh.servers and mesh.size(*_SPLIT_AXES) == 1
    if world.size == 1 or not is_replicated:
        return []
    persistent = prepared.model.state_dict(keep_vars=True)
    buffers = {
        name: buffer
        for name, buffer in prepared.model.named_buffers()
        if name in persistent and not isinstance(buffer, DTensor)
    }
    if not buffers:
        return []
    rows = torch.stack(fingerprints_by_rank(buffers.values(), world))
    is_different = (rows != rows[0]).any(0).tolist()
    return [name for name, different in zip(buffers, is_different, strict=True) if different]
