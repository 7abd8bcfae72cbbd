"""Mesh: the coordinates of a rank on the axes of its layout, and its process groups.

Ranks are numbered along the axes like the digits of a number, with the last axis fastest:

    fsdp:shard=2,tensor=2 on 4 ranks        pipeline:shard=2,tensor=2 on 8 ranks

                 tensor                     stage 0     tensor          stage 1     tensor
                 0    1                                 0    1                      0    1
       shard 0   0    1                      shard 0    0    1           shard 0    4    5
             1   2    3                            1    2    3                 1    6    7

The axis on which two ranks differ decides which data they read:

    replicate, shard, expert   different samples
    context                    different parts of the same sequences
    tensor, pipeline           the same samples

The servers of a parameter server have the ranks before the mesh. They are on no axis and read no data.
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
    """A rank's coordinate on every axis, outermost first. An axis that the layout does not have has size 1.

    servers       number of ranks before the mesh; they have the coordinates of its first rank, which mean nothing
    in_lockstep   all ranks that read data are in the same update, so one may wait for another
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
        """Return the slice of each micro-batch that this rank reads."""
        if self.is_server:
            return Slice(0, 0)
        return Slice(self._index_along(SAMPLE_AXES), self.size(*SAMPLE_AXES))

    @property
    def rng_stream(self) -> int:
        """Return the random stream for dropout: different for ranks with different samples or positions."""
        return self.data_rank

    @property
    def data_rank(self) -> int:
        """Return the index of this rank among the ranks with different samples or positions."""
        return self._index_along(DATA_AXES)

    def _index_along(self, axes: Iterable[str]) -> int:
        """Return the index of this rank among the ranks that differ from it only in these axes, outermost first."""
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.coordinate[axis]
        return index

    @property
    def is_server(self) -> bool:
        """Return whether this rank is a parameter server, outside the mesh."""
        return self.world.rank < self.servers

    def is_first(self, *axes: str) -> bool:
        """Return whether this rank is the first on all these axes, and so counts for all replicas along them."""
        return all(self.coordinate[axis] == 0 for axis in axes)

    def group(self, *axes: str, use: str = "") -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this one only in these axes; None for a single rank.

        The first call for a set of axes is a collective over the whole world. Each `use` has a separate group.
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
        """Create the groups along these axes in the same order on every rank, and return this rank's group."""
        all_coordinates = itertools.product(*(range(size) for size in self.sizes.values()))
        ranks_of_groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(all_coordinates, self.servers):
            other_coordinates = tuple(
                index for axis, index in zip(self.sizes, coordinate, strict=True) if axis not in axes
            )
            ranks_of_groups.setdefault(other_coordinates, []).append(rank)
        group = self._split_world(list(ranks_of_groups.values()))
        _wait_until_connected(self.world, "x".join(axes))
        return group

    def _split_world(self, ranks_of_groups: list[list[int]]) -> Any:
        """Create a process group for each of these lists of ranks, and return the group of this rank."""
        timeout = datetime.timedelta(seconds=self.world.timeout_seconds)
        if getattr(self.world.group, "bound_device_id", None) is None:
            return dist.new_subgroups_by_enumeration(ranks_of_groups, timeout=timeout)[0]
        # the world's group is bound to a device under nccl, where one split of its communicator creates all groups
        return dist.split_group(split_ranks=ranks_of_groups, timeout=timeout)

    def rank_at(self, **coordinate: int) -> int:
        """Return the rank with these coordinates. On all other axes it has the coordinates of this rank."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinate.get(axis, self.coordinate[axis])
        return self.servers + rank

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Return a DeviceMesh over the axes that parameters are laid out on: pipeline, replicate, shard, tensor.

        `context` and `expert` are folded into `shard`. Parameters are equal along all of them, so FSDP shards over all
        of them. Parameters of experts use `expert_device_mesh`.
        """
        sizes = {axis: self.sizes[axis] for axis in AXES if axis not in ("context", "expert")}
        sizes["shard"] *= self.size("context", "expert")
        axes_and_sizes = tuple((axis, size) for axis, size in sizes.items() if size > 1 or axis in axes)
        return make_device_mesh(self.world, axes_and_sizes)[axes]

    def expert_device_mesh(self, *axes: str) -> DeviceMesh:
        """Return the DeviceMesh for parameters of experts, where `expert` is a separate axis."""
        sizes = {axis: self.sizes[axis] for axis in AXES if axis != "context"}
        sizes["shard"] *= self.sizes["context"]
        # torch combines only slices of the same mesh, so the mesh always has both the shard and the expert axis
        axes_and_sizes = tuple((axis, size) for axis, size in sizes.items() if size > 1 or axis in ("shard", "expert"))
        return make_device_mesh(self.world, axes_and_sizes)[axes]

    def group_axes(self) -> dict[str, str]:
        """Return a dict from the name of each process group to its axes in this layout, for measuring communication."""
        axes_of_groups = {getattr(self.world.group, "group_name", ""): self._axes_text(AXES)}
        for (sizes, axes, _), group in self.world.group_cache.groups.items():
            if sizes == tuple(self.sizes.items()) and group is not None:  # a server is in no group of trainers
                axes_of_groups[group.group_name] = self._axes_text(axes)
        for mesh in self.world.group_cache.device_meshes.values():
            if mesh.size() == self.world.size:
                names = mesh.mesh_dim_names or ()
                # `device_mesh` folds axes into shard. Layouts with and without a context axis share the cached mesh,
                # so `_axes_text` keeps only the axes of this layout.
                folded_axes = [axis for axis in ("shard", "context", "expert") if axis == "shard" or axis not in names]
                for axis in names:
                    mesh_axes = folded_axes if axis == "shard" else (axis,)
                    axes_of_groups.setdefault(mesh.get_group(axis).group_name, self._axes_text(mesh_axes) or axis)
        return axes_of_groups

    def _axes_text(self, axes: Iterable[str]) -> str:
        """Return the axes that have more than one rank, as text. For example: `replicate x context`."""
        return " x ".join(axis for axis in axes if self.sizes.get(axis, 1) > 1)


def make_device_mesh(world: World, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Return torch's DeviceMesh over all ranks with these axes (name, size), outermost first; cached per world."""
    meshes = world.group_cache.device_meshes
    if axes not in meshes:
        names, sizes = zip(*axes, strict=True)
        device_mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        for name in names if world.backend != "fake" else ():
            # torch creates these groups with its default timeout, which is up to half an hour
            group: Any = device_mesh.get_group(name)
            group.set_timeout(datetime.timedelta(seconds=world.timeout_seconds))
        _wait_until_connected(world, "x".join(names))
        meshes[axes] = device_mesh
    return meshes[axes]


def _wait_until_connected(world: World, name: str) -> None:
    """Wait until all ranks have created a group. If one had failed before, the others would hang inside gloo later."""
    count = len(world.group_cache.groups) + len(world.group_cache.device_meshes)
    store_barrier(world, f"process group {count} ({name})")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the rank's local part of a DTensor. Other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(value: Any) -> Any:
    """Gather a DTensor on each rank, which is a collective. Other values are returned unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the rank's local part of each tensor."""
    return [local_tensor(tensor) for tensor in tensors]


def open_mesh(layout: Layout, world: World) -> Mesh:
    """Return the mesh of a layout in this world.

    Raises `LayoutError` if the degrees of the axes do not multiply to the world size.
    """
    degrees = layout.mesh(world.size) if layout.axis is not None else {}
    if layout.row.any_axes:
        degrees = find_custom_parallelize(layout, world.size).sizes()
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    coordinate: dict[str, int] = {}
    servers = layout.servers
    index = max(0, world.rank - servers)
    for axis in reversed(AXES):
        index, coordinate[axis] = divmod(index, sizes[axis])
    return Mesh(world, sizes, {axis: coordinate[axis] for axis in AXES}, servers)
