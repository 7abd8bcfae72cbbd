"""A guard against silent divergence: a checksum of what several ranks hold alike, every so many updates.

Replicas start equal and do the same arithmetic on the same gradients, so they stay equal to the last bit. Where they
do not (a bit that memory has flipped, a kernel that computes another thing on one card, code that draws random numbers
of its own), nothing fails: the losses go on falling, of another training on each rank. So every rank adds up the bits
of what it holds, one all-reduce of a small table brings the sums together, and those of replicas are compared.

Which ranks are replicas of what, the layout says: a tensor on a mesh is held alike by ranks that differ only in axes
on which it is not split; plain parameters, buffers and their optimizer state by all ranks that have them. What nobody
else holds (a shard under FSDP, the state that a rank owns under zero1) cannot be compared with anything.
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

_COLUMNS = 1024
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number: multiplying by it loses no bit
_SMALL = 1 << 16  # elements; smaller tensors are laid side by side and read in one go
_MOST_KINDS = 32  # rows of the table: ways in which a rank's tensors are held
_SHOWN = 3  # tensors in a message
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Guard:
    """Compares replicas every `every` updates, and before a checkpoint is saved. All methods are collectives.

    how         "stop": a difference ends the training (`DivergedError`); "warn": it is said
    compares    whether any rank here holds what another one holds too
    """

    def __init__(self, prepared: Prepared, how: str, every: int, begin: int) -> None:
        self.prepared, self.how, self.every = prepared, how, every
        self.equal_after, self.compared_at = begin, -1
        self.said = ""
        self.plain = _replicated_names(prepared)
        keys: list[int] = self._table(dict(self._kinds()))[:, :, 0].flatten().tolist()
        self.compares = any(count > 1 for key, count in collections.Counter(keys).items() if key)

    def is_due(self, done: int) -> bool:
        """Whether replicas are compared after so many updates, wherever nothing is saved."""
        return done % self.every == 0

    def check(self, done: int) -> str:
        """Compare; under "warn" the line to show, once for each set of tensors that differ, else "".

        Raises `DivergedError` under "stop", on every rank alike.
        """
        if not self.compares or not self.prepared.are_replicas_equal or self.compared_at == done:
            return ""
        self.compared_at = done
        kinds = dict(self._kinds())
        table = self._table(kinds)
        if not _differ(table):
            self.equal_after = done
            return ""
        found = self._found(kinds)
        line = (
            f"after update {done}: {found}; all replicas were equal after update {self.equal_after}: what changed them "
            f"happened in the updates {self.equal_after + 1} to {done}"
        )
        if self.how == "stop":
            raise DivergedError(f"{line}; nothing of it was saved: go on from the last checkpoint with --resume")
        is_new, self.said = found != self.said, found
        return f"{line}; the training goes on (--guard warn)" if is_new else ""

    def _kinds(self) -> Iterator[tuple[tuple[object, ...], dict[str, Tensor]]]:
        """How a rank holds its tensors -> those it holds so, by name: equal on all ranks that give the same key."""
        kinds: dict[tuple[object, ...], dict[str, Tensor]] = collections.defaultdict(dict)
        own = tensors_of(self.prepared.trainable, self.prepared.world)
        buffers = {name for name, _ in self.prepared.model.named_buffers()}
        for full, tensor in own.items():
            held = self._held(full, tensor, buffers)
            if held is not None:
                kinds[held][full] = local_tensor(tensor)
        for held, tensors in kinds.items():
            names = zlib.crc32("\n".join(f"{name} {tuple(part.shape)}" for name, part in tensors.items()).encode())
            yield (*held, names), tensors

    def _held(self, full: str, tensor: Tensor, buffers: set[str]) -> tuple[object, ...] | None:
        """The coordinates on which a tensor depends, after its kind; None where nothing says who else holds it."""
        kind, _, rest = full.partition("/")
        if kind == "generators" or self.prepared.mesh.servers:
            return None
        if kind == "optimizer" and self.prepared.averaging is not None:
            return None  # each rank's own, whatever its weights
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return None
            axes = zip(
                tensor.device_mesh.mesh_dim_names or (),
                tensor.device_mesh.get_coordinate() or (),
                tensor.placements,
                strict=True,
            )
            return kind, *((name, place) for name, place, placement in axes if not placement.is_replicate())
        name = rest if kind != "optimizer" else rest.rpartition("/")[0]
        if name in self.plain:
            return kind, "plain"
        # blocks of a pipeline: ranks that have this one hold it alike; buffers may be a rank's own
        is_block = self.prepared.mesh.size("pipeline") > 1 and name not in buffers
        return (kind, "block") if is_block else None

    def _table(self, kinds: Mapping[tuple[object, ...], Mapping[str, Tensor]]) -> Tensor:
        """Every rank's (key, checksum) of each of its kinds, zeros where it has none: int64, (ranks, kinds, 2)."""
        world = self.prepared.world
        assert len(kinds) <= _MOST_KINDS
        table = torch.zeros((world.size, _MOST_KINDS, 2), dtype=torch.int64, device=world.device)
        for row, (key, tensors) in enumerate(kinds.items()):
            table[world.rank, row, 0] = 1 + zlib.crc32(repr(key).encode())
            table[world.rank, row, 1] = bits_checksum(list(tensors.values()))
        if world.group is not None and world.size > 1:
            dist.all_reduce(table, group=world.group)
        return table.cpu()

    def _found(self, kinds: Mapping[tuple[object, ...], Mapping[str, Tensor]]) -> str:
        """Which ranks hold another tensor than most do, and which tensor."""
        own = [
            [repr(key), name, int(bits_checksum([tensor]))]
            for key, tensors in kinds.items()
            for name, tensor in tensors.items()
        ]
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        by_tensor: dict[tuple[str, str], dict[int, list[int]]] = {}
        for rank, row in enumerate(all_gather(text, self.prepared.world)):
            for key, name, value in json.loads(bytes(row.tolist())):
                by_tensor.setdefault((key, name), {}).setdefault(value, []).append(rank)
        differing = {name: sums for (_, name), sums in by_tensor.items() if len(sums) > 1}
        texts = [_who(name, list(sums.values())) for name, sums in differing.items()]
        more = f"; and {len(texts) - _SHOWN} more tensors" if len(texts) > _SHOWN else ""
        return "; ".join(texts[:_SHOWN]) + more


def _replicated_names(prepared: Prepared) -> set[str]:
    """Names of the plain tensors of the model that every rank holds in full."""
    model = prepared.model
    replicated = {id(tensor) for tensor in prepared.replicated_tensors}
    found = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) in replicated}
    options = prepared.layout.row.options
    if BatchNormOptions in options and prepared.layout.read(BatchNormOptions).batch_norm == "sync":
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and prepared.mesh.size("pipeline") == 1:  # pyright: ignore[reportPrivateUsage]
                found |= {f"{name}.{buffer}" if name else buffer for buffer, _ in module.named_buffers()}
    return found


def _differ(table: Tensor) -> bool:
    """Whether two ranks with the same key have different sums."""
    sums: dict[int, int] = {}
    rows = table.reshape(-1, 2).tolist()
    return any(key and sums.setdefault(key, value) != value for key, value in rows)


def _who(full: str, groups: list[list[int]]) -> str:
    """`rank 2 holds another 0.weight than ranks 0, 1, 3`; of two halves nobody knows which is right."""
    kind, _, rest = full.partition("/")
    tensor = {"model": rest, "average": f"average of {rest}", "optimizer": f"optimizer state {rest}"}[kind]
    groups.sort(key=len)
    *few, most = groups
    if len(few[-1]) == len(most):
        return f"{tensor} differs between {' and '.join(map(_ranks, groups))}"
    odd = sorted(rank for group in few for rank in group)
    return f"{_ranks(odd)} {'holds' if len(odd) == 1 else 'hold'} another {tensor} than {_ranks(most)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@torch.no_grad()
def bits_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A number that changes with any single bit of any tensor, and where elements change places: int64, shape ().

    A sum of the elements' bits, read as integers, each times a number that depends on its place and is odd: modulo
    2^64 no odd factor loses a bit. Reads each tensor about twice, and makes no copy of a large one.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
        if bits.numel() <= _SMALL:
            small.setdefault(bits.dtype, []).append(bits)
        else:
            total = total * _ODD + _weighted(bits)
    for parts in small.values():
        total = total * _ODD + _weighted(torch.cat(parts))
    return total


def _weighted(bits: Tensor) -> Tensor:
    """The sum over rows and columns of 1024, each column times an odd number and each row plus an even one."""
    rows = len(bits) // _COLUMNS
    body, tail = bits[: rows * _COLUMNS].view(rows, _COLUMNS), bits[rows * _COLUMNS :]
    by_column = torch.arange(_COLUMNS, device=bits.device) * 2 + 1
    by_row = torch.arange(1, rows + 1, device=bits.device) * (2 * _COLUMNS)
    total = (body.sum(0, dtype=torch.int64) * by_column).sum() + (body.sum(1, dtype=torch.int64) * by_row).sum()
    last = by_column[: len(tail)] + 2 * _COLUMNS * (rows + 1)
    return total + (tail.to(torch.int64) * last).sum()
