"""Mesh: the coordinates of a rank on the axes of its layout, and its process groups.

Ranks are numbered along the axes like the digits of a number, with the last axis fastest:

    fsdp:shard=2,tensor=2 on 4 ranks        pipeline:shard=2,tensor=2 on 8 ranks

                 tensor                     stage 0     tensor          stage 1     tensor
                 0    1                                 0    1                      0    1
       shard 0   0    1                      shard 0    0    1           shard 0    4    5
             1   2    3                            1    2    3                 1    6    7

Ranks that differ in replicate, shard or expert read different samples; in context, different parts of the same
sequences; in tensor and pipeline, the same samples. The servers of a parameter server have the ranks before the mesh,
are on no axis, and read no data.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from everyrank.data import Slice
from everyrank.layout import AXES, DATA_AXES, SAMPLE_AXES, Layout, find_custom_parallelize
from everyrank.world import World, store_barrier

__all__ = ["Mesh", "full_tensor", "local_tensor", "local_tensors", "make_device_mesh", "open_mesh"]


@dataclass(frozen=True)
class Mesh:
    """A rank's coordinate on every axis, outermost first; an axis that the layout does not have is one rank long.

    servers       ranks before the mesh; their coordinates are meaningless (those of the first rank)
    in_lockstep   all readers are in the same update, so one may wait for another
    """

    world: World
    sizes: Mapping[str, int]
    coordinate: Mapping[str, int]
    servers: int = 0
    in_lockstep: bool = True

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def data_slice(self) -> Slice:
        """The slice of each micro-batch that this rank reads."""
        if self.is_server:
            return Slice(0, 0)
        return Slice(self._place(SAMPLE_AXES), self.size(*SAMPLE_AXES))

    @property
    def rng_stream(self) -> int:
        """The stream of random numbers for dropout: different for ranks with different samples or positions."""
        return self.data_rank

    @property
    def data_rank(self) -> int:
        """The index of this rank among the ranks with different samples or positions."""
        return self._place(DATA_AXES)

    def _place(self, axes: Iterable[str]) -> int:
        """Return the index of this rank among those that differ from it in these axes, outermost first."""
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.coordinate[axis]
        return index

    @property
    def is_server(self) -> bool:
        """Whether this rank is a parameter server, outside the mesh."""
        return self.world.rank < self.servers

    def is_first(self, *axes: str) -> bool:
        """Whether this rank is the first on all these axes, and so counts for all replicas along them."""
        return all(self.coordinate[axis] == 0 for axis in axes)

    def group(self, *axes: str, use: str = "") -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this one only in these axes; None if there are none.

        The first call for a set of axes is a collective over the whole world. Each `use` has its own group.
        """
        if self.size(*axes) == 1 or self.world.group is None:
            return None
        if self.size(*axes) == self.world.size and not use:
            return self.world.group
        cache = self.world.group_cache
        key = (tuple(self.sizes.items()), axes, use)
        if key not in cache.groups:
            cache.groups[key] = self._new_group(axes)
        return cache.groups[key]

    def _new_group(self, axes: tuple[str, ...]) -> Any:
        """Create the groups along these axes in the same order on every rank. Returns this rank's group."""
        everywhere = itertools.product(*(range(size) for size in self.sizes.values()))
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(everywhere, self.servers):
            others = tuple(at for axis, at in zip(self.sizes, coordinate, strict=True) if axis not in axes)
            members.setdefault(others, []).append(rank)
        group = self._split_world(list(members.values()))
        _wait_until_connected(self.world, "x".join(axes))
        return group

    def _split_world(self, members: list[list[int]]) -> Any:
        timeout = datetime.timedelta(seconds=self.world.timeout_seconds)
        if getattr(self.world.group, "bound_device_id", None) is None:
            return dist.new_subgroups_by_enumeration(members, timeout=timeout)[0]  # one after the other
        return dist.split_group(
            split_ranks=members, timeout=timeout
        )  # nccl: one split of the communicator creates all groups

    def rank_at(self, **coordinate: int) -> int:
        """Return the rank with these coordinates, and otherwise the same as this rank's."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinate.get(axis, self.coordinate[axis])
        return self.servers + rank

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Return a DeviceMesh over the axes that parameters are laid out on: pipeline, replicate, shard, tensor.

        `context` and `expert` are folded into `shard`: parameters are equal along all of them, so FSDP shards over all
        of them. Parameters of experts use `expert_device_mesh`.
        """
        sizes = {axis: self.sizes[axis] for axis in AXES if axis not in ("context", "expert")}
        sizes["shard"] *= self.size("context", "expert")
        used = tuple((axis, size) for axis, size in sizes.items() if size > 1 or axis in axes)
        return make_device_mesh(self.world, used)[axes]

    def expert_device_mesh(self, *axes: str) -> DeviceMesh:
        """Return the DeviceMesh for parameters of experts, where `expert` is an axis of its own."""
        sizes = {axis: self.sizes[axis] for axis in AXES if axis != "context"}
        sizes["shard"] *= self.sizes["context"]
        # torch combines only slices of the same mesh, so it is always created with all axes
        used = tuple((axis, size) for axis, size in sizes.items() if size > 1 or axis in ("shard", "expert"))
        return make_device_mesh(self.world, used)[axes]

    def group_axes(self) -> dict[str, str]:
        """Return process group name -> axes of this layout, for measuring communication."""
        result = {getattr(self.world.group, "group_name", ""): self._axes_text(AXES)}
        for (sizes, axes, _), group in self.world.group_cache.groups.items():
            if sizes == tuple(self.sizes.items()) and group is not None:  # a server is not in the groups of trainers
                result[group.group_name] = self._axes_text(axes)
        for mesh in self.world.group_cache.device_meshes.values():
            if mesh.size() == self.world.size:  # one over context as well serves layouts with and without that axis
                names = mesh.mesh_dim_names or ()
                parts_of_shard = [
                    axis for axis in ("shard", "context", "expert") if axis == "shard" or axis not in names
                ]
                for axis in names:
                    along = parts_of_shard if axis == "shard" else (axis,)  # see `device_mesh`
                    result.setdefault(mesh.get_group(axis).group_name, self._axes_text(along) or axis)
        return result

    def _axes_text(self, axes: Iterable[str]) -> str:
        """Return `replicate x context`: those of these axes with more than one rank."""
        return " x ".join(axis for axis in axes if self.sizes.get(axis, 1) > 1)


def make_device_mesh(world: World, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Return torch's DeviceMesh over all ranks with these axes (name, size), outermost first; cached per world."""
    meshes = world.group_cache.device_meshes
    if axes not in meshes:
        names, sizes = zip(*axes, strict=True)
        made = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        for name in names if world.backend != "fake" else ():  # the default of torch is half an hour
            group: Any = made.get_group(name)
            group.set_timeout(datetime.timedelta(seconds=world.timeout_seconds))
        _wait_until_connected(world, "x".join(names))
        meshes[axes] = made
    return meshes[axes]


def _wait_until_connected(world: World, name: str) -> None:
    """Barrier after making groups: if a rank failed before the others connect, they would hang inside gloo."""
    count = len(world.group_cache.groups) + len(world.group_cache.device_meshes)
    store_barrier(world, f"process group {count} ({name})")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the rank's local part of a tensor; unsharded tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(value: Any) -> Any:
    """Gather a sharded tensor on each rank; other tensors unchanged. A collective for sharded ones."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the rank's local part of each tensor."""
    return [local_tensor(tensor) for tensor in tensors]


def open_mesh(layout: Layout, world: World) -> Mesh:
    """Open the mesh of a layout in this world. Raises `LayoutError` for degrees that do not multiply to its size."""
    degrees = layout.mesh(world.size) if layout.axis is not None else {}
    if layout.row.any_axes:
        degrees = find_custom_parallelize(layout, world.size).sizes()
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    coordinate: dict[str, int] = {}
    servers = layout.servers
    left = max(0, world.rank - servers)
    for axis in reversed(AXES):
        left, coordinate[axis] = divmod(left, sizes[axis])
    return Mesh(world, sizes, {axis: coordinate[axis] for axis in AXES}, servers)
