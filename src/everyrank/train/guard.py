"""Detects silent divergence of replicas by checksums (`--guard`), every N updates and before each checkpoint.

Replicas start equal and apply the same arithmetic to the same gradients, so they stay bitwise equal. A flipped bit in
memory, a faulty GPU or rank-dependent random numbers break this without an error: the losses still fall, but each rank
trains a different model. So every rank computes checksums of its tensors, one all-reduce collects them in a small
table, and the checksums of replicas are compared.

The layout determines which ranks are replicas. Ranks hold the same part of a DTensor if they differ only along mesh
axes on which it is not sharded. Plain parameters and their optimizer state are equal on all ranks that have them, and
so are the buffers that the layout replicates. Other buffers, and the optimizer state under local_sgd, are not compared.
A tensor on one rank only (a shard under FSDP, optimizer state under zero1) is not compared either.
"""

from __future__ import annotations

import collections
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.checkpoint.contents import tensors_of
from everyrank.errors import DivergedError
from everyrank.layout.options import BatchNormOptions
from everyrank.parallel.mesh import local_tensor
from everyrank.strategies import Prepared
from everyrank.world.collectives import all_gather

__all__ = ["Guard", "bits_checksum"]

_ROW_LENGTH = 1024  # elements in a row of a checksum
_ODD = (
    -7046029254386353131
)  # 2^64 divided by the golden ratio, as a signed number; odd, so multiplying by it loses no bit
_MAX_SMALL = 1 << 16  # elements; smaller tensors are concatenated and read at once
_MAX_SETS = 32  # rows of the table: one for each set of tensors with the same replicas
_MAX_SHOWN = 3  # tensors in a message
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Guard:
    """Compares replicas every `every` updates, and before each checkpoint. `__init__` and `check` are collectives.

    how         "stop" raises `DivergedError` for a difference; "warn" prints it
    compares    whether any tensor is on more than one rank
    """

    def __init__(self, prepared: Prepared, how: str, every: int, start_step: int) -> None:
        self.prepared, self.how, self.every = prepared, how, every
        self.equal_after, self.compared_at = start_step, -1
        self.last_difference = ""
        self.replicated_names = _replicated_names(prepared)
        keys: list[int] = self._table(dict(self._replica_sets()))[:, :, 0].flatten().tolist()
        self.compares = any(count > 1 for key, count in collections.Counter(keys).items() if key)

    def is_due(self, step: int) -> bool:
        """Return whether to compare replicas after `step` updates, apart from checkpoints."""
        return step % self.every == 0

    def check(self, step: int) -> str:
        """Compare replicas. Under "warn", returns a line to print, once for each set of tensors that differ, else "".

        Raises `DivergedError` on every rank under "stop".
        """
        if not self.compares or not self.prepared.are_replicas_equal or self.compared_at == step:
            return ""
        self.compared_at = step
        replica_sets = dict(self._replica_sets())
        table = self._table(replica_sets)
        if not _differ(table):
            self.equal_after = step
            return ""
        difference = self._difference(replica_sets)
        line = (
            f"after update {step}: {difference}; all replicas were equal after update {self.equal_after}: "
            f"one of the updates {self.equal_after + 1} to {step} changed them"
        )
        if self.how == "stop":
            raise DivergedError(f"{line}; this state was not saved; continue from the last checkpoint with --resume")
        is_new, self.last_difference = difference != self.last_difference, difference
        return f"{line}; the training continues (--guard warn)" if is_new else ""

    def _replica_sets(self) -> Iterator[tuple[tuple[object, ...], dict[str, Tensor]]]:
        """Yield (key, tensors by name). Ranks with the same key have to hold equal tensors."""
        replica_sets: dict[tuple[object, ...], dict[str, Tensor]] = collections.defaultdict(dict)
        tensors = tensors_of(self.prepared.trainable, self.prepared.world)
        buffers = {name for name, _ in self.prepared.model.named_buffers()}
        for full_name, tensor in tensors.items():
            replica_key = self._replica_key(full_name, tensor, buffers)
            if replica_key is not None:
                replica_sets[replica_key][full_name] = local_tensor(tensor)
        for replica_key, tensors in replica_sets.items():
            names = zlib.crc32("\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()).encode())
            yield (*replica_key, names), tensors

    def _replica_key(self, full_name: str, tensor: Tensor, buffers: set[str]) -> tuple[object, ...] | None:
        """Return a tensor's category and the mesh coordinates of its shard; None if it is not compared.

        The category is the first part of its name: model, average or optimizer.
        """
        category, _, name = full_name.partition("/")
        if category == "generators" or self.prepared.mesh.servers:
            return None
        if category == "optimizer" and self.prepared.averaging is not None:
            return None  # local_sgd averages only floating-point tensors of the optimizer, so the rest may differ
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return None
            axes = zip(
                tensor.device_mesh.mesh_dim_names or (),
                tensor.device_mesh.get_coordinate() or (),
                tensor.placements,
                strict=True,
            )
            return category, *(
                (name, coordinate) for name, coordinate, placement in axes if not placement.is_replicate()
            )
        tensor_name = name if category != "optimizer" else name.rpartition("/")[0]
        if tensor_name in self.replicated_names:
            return category, "plain"
        # a block of a pipeline is equal on all ranks that have it; a buffer may differ
        is_block = self.prepared.mesh.size("pipeline") > 1 and tensor_name not in buffers
        return (category, "block") if is_block else None

    def _table(self, replica_sets: Mapping[tuple[object, ...], Mapping[str, Tensor]]) -> Tensor:
        """Return the (key, checksum) pairs of every rank: int64, shape (ranks, _MAX_SETS, 2). Unused rows are 0.

        A collective.
        """
        world = self.prepared.world
        assert len(replica_sets) <= _MAX_SETS
        table = torch.zeros((world.size, _MAX_SETS, 2), dtype=torch.int64, device=world.device)
        for row, (key, tensors) in enumerate(replica_sets.items()):
            table[world.rank, row, 0] = 1 + zlib.crc32(repr(key).encode())
            table[world.rank, row, 1] = bits_checksum(list(tensors.values()))
        if world.group is not None and world.size > 1:
            dist.all_reduce(table, group=world.group)
        return table.cpu()

    def _difference(self, replica_sets: Mapping[tuple[object, ...], Mapping[str, Tensor]]) -> str:
        """Return which ranks hold a different tensor than the majority, and which tensor."""
        local_sums = [
            [repr(key), name, int(bits_checksum([tensor]))]
            for key, tensors in replica_sets.items()
            for name, tensor in tensors.items()
        ]
        text = torch.frombuffer(bytearray(json.dumps(local_sums).encode()), dtype=torch.uint8)
        by_tensor: dict[tuple[str, str], dict[int, list[int]]] = {}
        for rank, row in enumerate(all_gather(text, self.prepared.world)):
            for key, name, value in json.loads(bytes(row.tolist())):
                by_tensor.setdefault((key, name), {}).setdefault(value, []).append(rank)
        differing = {name: sums for (_, name), sums in by_tensor.items() if len(sums) > 1}
        texts = [_ranks_that_differ(name, list(sums.values())) for name, sums in differing.items()]
        omitted = f"; and {len(texts) - _MAX_SHOWN} more tensors" if len(texts) > _MAX_SHOWN else ""
        return "; ".join(texts[:_MAX_SHOWN]) + omitted


def _replicated_names(prepared: Prepared) -> set[str]:
    """Return the names of the plain tensors of the model that every rank holds in full."""
    model = prepared.model
    replicated = {id(tensor) for tensor in prepared.replicated_tensors}
    names = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) in replicated}
    options = prepared.layout.row.options
    if BatchNormOptions in options and prepared.layout.read(BatchNormOptions).batch_norm == "sync":
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and prepared.mesh.size("pipeline") == 1:  # pyright: ignore[reportPrivateUsage]
                names |= {f"{name}.{buffer}" if name else buffer for buffer, _ in module.named_buffers()}
    return names


def _differ(table: Tensor) -> bool:
    """Return whether two ranks with the same key have different checksums."""
    sums: dict[int, int] = {}
    rows = table.reshape(-1, 2).tolist()
    return any(key and sums.setdefault(key, value) != value for key, value in rows)


def _ranks_that_differ(full_name: str, groups: list[list[int]]) -> str:
    """Return text like `0.weight of rank 2 differs from ranks 0, 1, 3`.

    Without a majority it is like `0.weight differs between rank 0 and rank 1`.
    """
    category, _, name = full_name.partition("/")
    tensor = {"model": name, "average": f"average of {name}", "optimizer": f"optimizer state {name}"}[category]
    groups.sort(key=len)
    *minorities, majority = groups
    if len(minorities[-1]) == len(majority):
        return f"{tensor} differs between {' and '.join(map(_ranks, groups))}"
    minority = sorted(rank for group in minorities for rank in group)
    return f"{tensor} of {_ranks(minority)} differs from {_ranks(majority)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@torch.no_grad()
def bits_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum (int64, shape ()) that changes with any single bit and if elements are swapped.

    The elements are read as integers, multiplied by odd numbers that depend on their index, and summed modulo 2^64;
    an odd factor loses no bit. Reads each tensor about twice and does not copy large ones.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    # by dtype and device: Adam keeps its step counts on the CPU next to CUDA parameters
    small_by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
        if bits.numel() <= _MAX_SMALL:
            small_by_dtype.setdefault((bits.dtype, bits.device), []).append(bits)
        else:
            total = total * _ODD + _weighted(bits).to(device)
    for small_tensors in small_by_dtype.values():
        total = total * _ODD + _weighted(torch.cat(small_tensors)).to(device)
    return total


def _weighted(bits: Tensor) -> Tensor:
    """Return the weighted sum of `bits`. All weights are odd.

    In rows of 1024 elements, the weight is 2 * column + 1 + 2048 * (row + 1).
    """
    rows = len(bits) // _ROW_LENGTH
    body, tail = bits[: rows * _ROW_LENGTH].view(rows, _ROW_LENGTH), bits[rows * _ROW_LENGTH :]
    by_column = torch.arange(_ROW_LENGTH, device=bits.device) * 2 + 1
    by_row = torch.arange(1, rows + 1, device=bits.device) * (2 * _ROW_LENGTH)
    total = (body.sum(0, dtype=torch.int64) * by_column).sum() + (body.sum(1, dtype=torch.int64) * by_row).sum()
    last = by_column[: len(tail)] + 2 * _ROW_LENGTH * (rows + 1)
    return total + (tail.to(torch.int64) * last).sum()
