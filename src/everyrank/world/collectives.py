"""All-reduce, all-gather and broadcast of small values over all ranks, outside the timed steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.world.world import World

__all__ = [
    "all_equal",
    "all_gather",
    "all_gather_json",
    "broadcast_value",
    "fingerprint",
    "fingerprints_by_rank",
    "sum_over_ranks",
]

_CHUNK_BYTES = 1 << 20  # bytes of a tensor that `fingerprint` converts to int64 at once


def sum_over_ranks(shares: Tensor, world: World) -> Tensor:
    """Return the sum of `shares` over all ranks, float64 on CPU, identical on all ranks. A collective."""
    total = shares.detach().to(world.device, torch.float64, copy=True)
    if world.group is not None and world.size > 1:
        dist.all_reduce(total, group=world.group)
    return total.cpu()


def all_gather(values: Tensor, world: World) -> list[Tensor]:
    """Return every rank's `values` (any shape, the same dtype) as a list by rank, flat, on CPU. A collective."""
    if world.group is None or world.size == 1:
        return [values.detach().cpu().clone()]
    return _gather(values.detach().reshape(-1).to(world.device), world.group)


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value` as a list by rank. A collective of a group that can send CPU tensors.

    The value has to be one that JSON can represent. torch's collectives for objects unpickle data of every rank, and a
    pickle can run any code.
    """
    if group is None:
        return [value]
    if dist.get_backend(group) == "fake":  # of World.pretend: every rank has this rank's value
        return [json.loads(json.dumps(value))] * dist.get_world_size(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(row.tolist())) for row in _gather(text, group)]


def broadcast_value(rank: int, value: Any, world: World) -> Any:
    """Return the `value` of `rank` on all ranks, on CPU: tensors in dicts, lists and tuples, and JSON values.

    A collective; `value` is ignored on the other ranks. Raises `TypeError` for a value of a different type.
    """
    tensors: list[Tensor] = []
    packed = _packed(value, tensors) if world.rank == rank else None
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    packed, shapes = all_gather_json([packed, shapes], world.group)[rank]
    if world.rank != rank:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
    for tensor in tensors:
        if world.group is not None and tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=rank, group=world.group)
    return _unpacked(packed, iter(tensors))


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` as JSON, and append its tensors, contiguous and on CPU, to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"is": "tensor"}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[key, _packed(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"is": kind, "items": [_packed(item, tensors) for item in value]}
    return {"is": "value", "value": value}


def _unpacked(packed: Any, tensors: Iterator[Tensor]) -> Any:
    if packed["is"] == "tensor":
        return next(tensors)
    if packed["is"] == "dict":
        return {key: _unpacked(item, tensors) for key, item in packed["items"]}
    if packed["is"] == "value":
        return packed["value"]
    items = [_unpacked(item, tensors) for item in packed["items"]]
    return tuple(items) if packed["is"] == "tuple" else items


def _gather(flat: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    size = dist.get_world_size(group)
    if dist.get_backend(group) == "fake":
        return [flat.cpu().clone() for _ in range(size)]
    sizes = [torch.zeros(1, dtype=torch.int64, device=flat.device) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(flat)], device=flat.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=flat.dtype, device=flat.device)
    padded[: len(flat)] = flat
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=group)
    return [row[: int(size)].cpu() for row, size in zip(rows, sizes, strict=True)]


def all_equal(tensors: list[Tensor], world: World) -> bool:
    """Return whether `tensors` are bitwise identical on all ranks. A collective."""
    if world.group is None or world.size == 1:
        return True
    rows = fingerprints_by_rank(tensors, world)
    return all(torch.equal(row, rows[0]) for row in rows)


def fingerprints_by_rank(tensors: Iterable[Tensor], world: World) -> list[Tensor]:
    """Return the fingerprints of every rank's `tensors` as a list by rank. A collective."""
    fingerprints = [fingerprint(tensor) for tensor in tensors]
    return all_gather(torch.stack(fingerprints) if fingerprints else torch.zeros(0, dtype=torch.int64), world)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum, a weighted sum of the bytes. It changes with any bit, and if two elements are swapped.

    int64, shape (), on CPU. Weights and products take 24 times the memory of the bytes, so chunks are summed.
    """
    all_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=all_bytes.device)
    for start in range(0, len(all_bytes), _CHUNK_BYTES):
        chunk = all_bytes[start : start + _CHUNK_BYTES].to(torch.int64)
        weights = torch.arange(start + 1, start + len(chunk) + 1, device=all_bytes.device) * 2654435761 % 4294967291
        total += (chunk * weights).sum()
    return total.cpu()
