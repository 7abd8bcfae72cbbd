"""What is written in the background: copies on CPU, on each rank those of what it is to write.

Where several ranks hold the same (replicas, parts that are replicated), one of them writes it. DCP decides that when it
writes, which is too late here: every rank of ddp would have copied the model and its optimizer into its host's memory,
to write an n-th of it. So the ranks agree first, by DCP's own rule: whoever has the fewest bytes so far.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from everyrank.parallel.mesh import local_tensor
from everyrank.world.collectives import all_gather_json

__all__ = ["Writers", "copies_on_cpu"]


class Writers:
    """Who writes what, agreed upon by the ranks of a group that carries CPU tensors. None: one process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.agreed: list[str] = []
        self.own: set[str] = set()

    def own_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `tensors` that this rank is to write: every part of every tensor is with one rank. A collective.

        What ranks have is told when it has changed; else all say that it has not.
        """
        if self.group is None:
            return dict(tensors)
        parts = [[name, _part(tensor), local_tensor(tensor).nbytes] for name, tensor in tensors.items()]
        digests = all_gather_json(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), self.group)
        if digests != self.agreed:
            rank = dist.get_rank(self.group)
            # ranks that have the same say it once
            told = all_gather_json(parts if digests.index(digests[rank]) == rank else None, self.group)
            rows = [told[digests.index(digest)] for digest in digests]
            self.own, self.agreed = _assign(rows)[rank], digests
        return {name: tensor for name, tensor in tensors.items() if name in self.own}


def _part(tensor: Tensor) -> list[int]:
    """Which part of a tensor this is: the coordinate on each dimension of the mesh along which it is cut."""
    if not isinstance(tensor, DTensor):
        return []
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of a mesh has no part"
    pairs = zip(tensor.placements, coordinate, strict=True)
    return [-1 if placement.is_replicate() else at for placement, at in pairs]


def _assign(rows: list[list[Any]]) -> list[set[str]]:
    """Names that each rank writes, out of every rank's (name, part, bytes)."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for rank, row in enumerate(rows):
        for name, part, num_bytes in row:
            key = (name, *part)
            holders.setdefault(key, []).append(rank)
            sizes[key] = num_bytes
    written = [0] * len(rows)
    own: list[set[str]] = [set() for _ in rows]
    for key, ranks in holders.items():
        writer = min(ranks, key=lambda rank: (written[rank], rank))
        written[writer] += sizes[key] or 1
        own[writer].add(key[0])
    return own


def copies_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that training does not change. The host waits once for each device, not for each tensor."""
    copies = {name: _copied(tensor) for name, tensor in tensors.items()}
    for device in {local_tensor(tensor).device for tensor in tensors.values()}:
        if device.type == "cuda":  # a model may lie on several
            torch.cuda.synchronize(device)
    return copies


def _copied(tensor: Tensor) -> Tensor:
    """A copy on CPU: of one on a device it is there when the device has done what it was asked before."""
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True, non_blocking=True)
    local = tensor.to_local().to("cpu", copy=True, non_blocking=True)
    mesh = _on_cpu(tensor.device_mesh)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh on CPU: a part of a tensor would be moved to the device of its mesh."""
    return mesh if mesh.device_type == "cpu" else _twin_on_cpu(mesh)


@functools.cache
def _twin_on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the very same ranks, which may be a part of all; nothing is sent over it, so it needs no groups."""
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
