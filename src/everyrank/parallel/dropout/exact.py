"""The forward pass in progress, as masks need to know it: which samples, positions and features are here, which call.

A call is known by the module that makes it and by how often that has been called in this forward pass; one of a
function by the block it is in. Both say the same in one process, in a stage of a pipeline that runs some of the blocks,
and in a block that runs once more in backward.

What a rank has of a tensor is read off its shape: the first dimension counts samples (or, flattened, a multiple of
them; or the second one does, where sequences come first); under context the dimension of the sequence is a head and a
tail of it; behind a colwise layer, up to the next rowwise one, the features or heads are a tensor rank's. A DTensor
says itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils import checkpoint

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.data.seeds import mix
from everyrank.errors import WorkloadError
from everyrank.parallel.dropout.masks import (
    DimPart,
    dropped_share,
    keep_mask,
    mix_bits,
    row_keys,
    sample_keys,
    whole_dim,
)
from everyrank.parallel.mesh import Mesh

__all__ = ["DropoutSite", "ExactDropout"]

_STREAM = 0xD40  # other numbers than whatever else is seeded by (seed, update)
_CALLS = [mix(number) for number in range(1 << 10)]  # a list: the compiler takes what it is asked for as a constant
_ALPHA = -1.7580993408473766  # what alpha dropout puts in the place of an element: the limit of SELU


class DropoutSite:
    """A place in the model that drops, or a block in which functions do, and its calls in this forward pass.

    key         int64, (): a tensor, so that one compiled graph serves all blocks
    most_calls  in a forward pass so far
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.key = torch.tensor(mix(*name.encode()), device=device)
        self.num_calls = self.most_calls = 0


@dataclass(frozen=True)
class _Moment:
    """Where a forward pass stands when a block begins."""

    keys: Tensor
    num_calls: list[int]
    scope: DropoutSite
    function_calls: int
    layout: str


class ExactDropout:
    """The samples that go through the model, and the calls that have been made.

    step         the update in progress
    keys         of the samples, int64 (B,)
    sites        all of the model, in the order in which they were found
    modules      those that drop where their p, which may change, is above 0
    is_watching  functions may drop, too
    scope        the block that is running, for dropout as a function
    is_recomputed   blocks are ours to run again, not the model's
    is_replaying a block of ours runs once more in backward
    split        how what is computed now lies on the tensor ranks: "", "features" or "sequence"
    """

    def __init__(self, seed: int, mesh: Mesh, sequence_dim: int | None, is_recomputed: bool) -> None:
        self.seed, self.mesh, self.device = seed, mesh, mesh.world.device
        self.sequence_dim, self.is_recomputed = sequence_dim, is_recomputed
        self.step = self.function_calls = self.length = 0
        self.split = ""
        self.pieces: tuple[range, ...] = ()
        self.keys = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.scope = DropoutSite("", self.device)
        self.sites = [self.scope]
        self.modules: list[Any] = []
        self.is_watching = self.is_replaying = False

    @property
    def is_used(self) -> bool:
        """Whether anything may be dropped now."""
        return self.is_watching or any(module.p for module in self.modules)

    def begin(self, batch: Batch, pieces: tuple[range, ...] = ()) -> None:
        """A micro-batch goes through the model now; under context these positions of its sequences."""
        if not self.is_used:
            return
        indices = batch.sample_indices or range(batch.start, batch.start + max(batch.size, 1))
        self.keys = sample_keys(mix(self.seed, self.step, _STREAM), indices, self.device)
        for site in self.sites:
            site.num_calls = 0
        self.scope, self.function_calls, self.split, self.pieces = self.sites[0], 0, "", pieces
        lengths: list[int] = []
        dim = self.sequence_dim
        if dim is not None:
            map_tensors(batch.input, lambda t: lengths.append(t.shape[dim]) or t if t.dim() > dim else t)
        self.length = lengths[0] if lengths else 0

    def moment(self) -> _Moment:
        """What a block that runs again in backward has to begin with."""
        num_calls = [site.num_calls for site in self.sites]
        return _Moment(self.keys, num_calls, self.scope, self.function_calls, self.split)

    @contextlib.contextmanager
    def back_at(self, moment: _Moment) -> Generator[None]:
        """While a block runs again: the masks that it drew the first time."""
        now, was_replaying = self.moment(), self.is_replaying
        self._go_to(moment)
        self.is_replaying = True
        try:
            yield
        finally:
            self._go_to(now)
            self.is_replaying = was_replaying

    def _go_to(self, moment: _Moment) -> None:
        self.keys, self.scope = moment.keys, moment.scope
        self.function_calls, self.split = moment.function_calls, moment.layout
        for site, count in zip(self.sites, moment.num_calls, strict=True):
            site.num_calls = count

    def module_key(self, site: DropoutSite) -> Tensor:
        """The key of a call of a module: the next one in this forward pass.

        Raises `WorkloadError` for one of several calls that a checkpoint of the model's own makes once more.
        """
        if not torch.compiler.is_compiling() and not self.is_replaying and _is_in_backward():
            if site.most_calls > 1:
                raise WorkloadError(
                    f"dropout {site.name} is called {site.most_calls} times in a forward pass, and again by a "
                    "checkpoint in the model: which call that is cannot be told; give each its own nn.Dropout, or let "
                    "the layout recompute (recompute=true) in place of the model"
                )
            return site.key + _call_key(1)
        site.num_calls += 1
        if site.num_calls > site.most_calls:
            site.most_calls = site.num_calls
        return site.key + _call_key(site.num_calls)

    def function_key(self) -> Tensor:
        """The key of a call of a function: the next one in the block that is running.

        Raises `WorkloadError` inside a checkpoint of the model's own, which calls it again where nobody watches.
        """
        if not torch.compiler.is_compiling() and not self.is_recomputed and is_in_checkpoint():
            raise WorkloadError(
                "dropout as a function inside torch.utils.checkpoint draws another mask when the model runs again; "
                "take nn.Dropout, or let the layout recompute (recompute=true) in place of the model"
            )
        self.function_calls += 1
        return self.scope.key + _call_key(self.scope.num_calls) + _call_key(-self.function_calls)

    def drop(self, values: Tensor, p: float, key: Tensor, is_channels: bool = False, is_alpha: bool = False) -> Tensor:
        """Dropout of `values`: of single elements or of whole channels, (B, C, ...). Gives a tensor of its own.

        Raises `WorkloadError` for a tensor of which it cannot be told which elements are whose.
        """
        share = dropped_share(p)
        if share == 0:
            return values
        if share == 1 and not is_alpha:
            return values * 0.0
        if isinstance(values, DTensor):
            local = self._drop_local(values.to_local(), share, key, is_channels, is_alpha, _dims_of(values))
            return DTensor.from_local(
                local,
                values.device_mesh,
                values.placements,
                run_check=False,
                shape=values.shape,
                stride=values.stride(),
            )
        return self._drop_local(values, share, key, is_channels, is_alpha, None)

    def _drop_local(
        self, values: Tensor, share: float, key: Tensor, is_channels: bool, is_alpha: bool, dims: Any
    ) -> Tensor:
        shape = values.shape[:2] if is_channels else values.shape
        keep = self._keep(shape, share, key, dims[: len(shape) - 1] if dims else None)
        keep = keep.view(*keep.shape, *(1,) * (values.dim() - keep.dim()))
        if is_alpha:
            factor = ((1 - share) * (1 + share * _ALPHA**2)) ** -0.5
            return torch.where(keep, values, _ALPHA) * factor - _ALPHA * factor * share
        return torch.where(keep, values * (1 / (1 - share)), 0.0)

    def _keep(self, shape: Sequence[int], share: float, key: Tensor, dims: Sequence[DimPart] | None) -> Tensor:
        """Which elements of a tensor are kept: bool, of its shape."""
        count, first = len(self.keys), shape[0] if shape else 0
        if first != count and len(shape) > 2 and shape[1] == count:  # sequences first
            flipped = self._keep((count, first, *shape[2:]), share, key, dims)
            return flipped.transpose(0, 1)
        keys = self.keys
        if first == 1 != count:  # one for all samples (an embedding of the positions)
            keys = mix_bits(keys.new_zeros(1) + mix(self.seed, self.step, _STREAM + 1))
        elif not first or first % count:
            raise WorkloadError(
                f"dropout of a tensor of shape {tuple(shape)}: none of its first dimensions counts the {count} "
                "samples, so that the mask would depend on the layout; keep samples first, or set "
                "Workload.dropout='torch'"
            )
        inner = list(shape[1:]) if first == len(keys) else [first // count, *shape[1:]]
        parts = list(dims) if dims is not None else self._dims(inner)
        parts = parts or [whole_dim(1)]  # a number for each sample
        rows = row_keys(mix_bits(keys + key), parts[:-1])
        return keep_mask(rows, parts[-1], share).view(*shape)

    def _dims(self, shape: Sequence[int]) -> list[DimPart]:
        """What is here of the dimensions behind the samples."""
        dims = [whole_dim(size) for size in shape]
        if not self.split and not self.pieces:
            return dims
        tensor, tensor_index = self.mesh.size("tensor"), self.mesh.coordinate["tensor"]
        length = self.length // tensor if self.split == "sequence" else self.length
        sequence_start = self._sequence_place(shape, length)
        if sequence_start is not None:
            pieces = self.pieces or (range(self.length),)
            if self.split == "sequence":
                pieces = _cut_pieces(pieces, range(tensor_index * length, (tensor_index + 1) * length))
            dims[sequence_start] = DimPart(pieces, self.length * self.mesh.size("context"))
        if self.split == "features" and shape:
            others = [index for index in range(len(shape)) if index != sequence_start] or [0]
            index = others[-1] if sequence_start is None and len(shape) <= 2 else others[0]
            dims[index] = self.features_here(shape[index])
        return dims

    def _sequence_place(self, shape: Sequence[int], length: int) -> int | None:
        """Which dimension behind the samples is the sequence, if one is: as in the input, or behind the heads."""
        places = [index for index, size in enumerate(shape) if size == length]
        usual = self.sequence_dim - 1 if self.sequence_dim is not None else None
        if not places or usual is None:
            return None
        if usual in places and len(places) > 1 and len(shape) > 2:
            raise WorkloadError(
                f"dropout of a tensor of shape (samples, {', '.join(map(str, shape))}), where this rank has {length} "
                "positions of the sequence: it cannot be told which dimension they are; take another number of "
                "heads or of ranks, or set Workload.dropout='torch'"
            )
        return usual if usual in places else places[0]

    def features_here(self, count: int, index: int = 0, parts: int = 1) -> DimPart:
        """So many features or heads: those of this tensor rank; of them part `part` of `parts`, of `count` each."""
        tensor, tensor_index = (
            (self.mesh.size("tensor"), self.mesh.coordinate["tensor"]) if self.split == "features" else (1, 0)
        )
        start = (tensor_index * parts + index) * count
        return DimPart((range(start, start + count),), tensor * parts * count)


def _call_key(number: int) -> int:
    """What tells the calls of a place apart: of modules counted up, of functions down from the end."""
    if number >= len(_CALLS) // 2 or number < -len(_CALLS) // 2:
        return mix(number % (1 << 64))
    return _CALLS[number]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]  (torch.utils.checkpoint asks it, too)


def is_in_checkpoint() -> bool:
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _cut_pieces(pieces: Sequence[range], span: range) -> tuple[range, ...]:
    """Of pieces laid end to end, what is in `span`."""
    result, start = list[range](), 0
    for piece in pieces:
        overlap = piece[max(0, span.start - start) : max(0, span.stop - start)]
        result += [overlap] if overlap else []
        start += len(piece)
    return tuple(result)


def _dims_of(values: DTensor) -> list[DimPart]:
    """What is here of the dimensions behind the samples of a tensor that says itself how it lies on the ranks."""
    dims = [whole_dim(size) for size in values.shape[1:]]
    for axis, placement in enumerate(values.placements):
        if isinstance(placement, Shard) and placement.dim:
            parts, index = values.device_mesh.size(axis), values.device_mesh.get_local_rank(axis)
            size = values.shape[placement.dim]
            each = -(-size // parts)
            dims[placement.dim - 1] = DimPart((range(min(size, index * each), min(size, (index + 1) * each)),), size)
    return dims
