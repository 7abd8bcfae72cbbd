"""ExactDropout: tracks which samples, positions and features are on this rank, and which dropout call is running.

A call of a module is identified by the module and its number of calls in this forward pass; a call of a function by the
block that contains it. Both are the same in one process, in a pipeline stage that runs only some blocks, and in a block
that is recomputed in backward.

The part of a tensor on this rank follows from its shape. The first dimension has the samples (or a multiple of them if
it is flattened; or the second one, if sequences come first). With context parallelism the sequence dimension is a head
and a tail. Between a colwise and a rowwise layer, features or heads are those of the tensor rank. A DTensor has its
placement.
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

_STREAM = 0xD40  # separates these numbers from others seeded by (seed, update)
_CALLS = [mix(number) for number in range(1 << 10)]  # a list, because the compiler treats its elements as constants
_ALPHA = -1.7580993408473766  # alpha dropout replaces elements by this limit of SELU


class DropoutSite:
    """A dropout module, or a block with dropout functions, and its calls in this forward pass.

    key         int64, (): a tensor, so that one compiled graph serves all blocks
    most_calls  largest number of calls in a forward pass so far
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.key = torch.tensor(mix(*name.encode()), device=device)
        self.num_calls = self.most_calls = 0


@dataclass(frozen=True)
class _Moment:
    """The state of a forward pass at the start of a block."""

    keys: Tensor
    num_calls: list[int]
    scope: DropoutSite
    function_calls: int
    layout: str


class ExactDropout:
    """The samples in the model, and the dropout calls so far.

    step         the current update
    keys         keys of the samples, int64 (B,)
    sites        all dropout sites of the model, in order
    modules      dropout modules, which are active if their p is above 0 (p may change)
    is_watching  whether functions are intercepted, too
    scope        the running block, for dropout functions
    is_recomputed   blocks are recomputed by everyrank, not by the model
    is_replaying    such a block is being recomputed
    split        how activations are split over the tensor ranks: "", "features" or "sequence"
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
        """Whether dropout may be active now."""
        return self.is_watching or any(module.p for module in self.modules)

    def begin(self, batch: Batch, pieces: tuple[range, ...] = ()) -> None:
        """Start a micro-batch; with context parallelism, `pieces` are its positions of the sequences."""
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
        """Return the state that a recomputed block has to start with."""
        num_calls = [site.num_calls for site in self.sites]
        return _Moment(self.keys, num_calls, self.scope, self.function_calls, self.split)

    @contextlib.contextmanager
    def back_at(self, moment: _Moment) -> Generator[None]:
        """Restore the state of a moment, so that a recomputed block gets the same masks."""
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
        """Return the key of the next call of a module in this forward pass.

        Raises `WorkloadError` if the model's own checkpointing repeats one of several calls.
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
        """Return the key of the next call of a function in the running block.

        Raises `WorkloadError` inside the model's own checkpointing, whose second call cannot be intercepted.
        """
        if not torch.compiler.is_compiling() and not self.is_recomputed and is_in_checkpoint():
            raise WorkloadError(
                "dropout as a function inside torch.utils.checkpoint draws another mask when the model runs again; "
                "take nn.Dropout, or let the layout recompute (recompute=true) in place of the model"
            )
        self.function_calls += 1
        return self.scope.key + _call_key(self.scope.num_calls) + _call_key(-self.function_calls)

    def drop(self, values: Tensor, p: float, key: Tensor, is_channels: bool = False, is_alpha: bool = False) -> Tensor:
        """Drop elements, or whole channels (B, C, ...), of `values`; returns a new tensor.

        Raises `WorkloadError` if the shape does not show which elements belong to which sample.
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
        """Return which elements of a tensor are kept: bool, of the same shape."""
        count, first = len(self.keys), shape[0] if shape else 0
        if first != count and len(shape) > 2 and shape[1] == count:  # sequences first
            flipped = self._keep((count, first, *shape[2:]), share, key, dims)
            return flipped.transpose(0, 1)
        keys = self.keys
        if first == 1 != count:  # shared by all samples (for example an embedding of the positions)
            keys = mix_bits(keys.new_zeros(1) + mix(self.seed, self.step, _STREAM + 1))
        elif not first or first % count:
            raise WorkloadError(
                f"dropout of a tensor of shape {tuple(shape)}: none of its first dimensions counts the {count} "
                "samples, so that the mask would depend on the layout; keep samples first, or set "
                "Workload.dropout='torch'"
            )
        inner = list(shape[1:]) if first == len(keys) else [first // count, *shape[1:]]
        parts = list(dims) if dims is not None else self._dims(inner)
        parts = parts or [whole_dim(1)]  # one number per sample
        rows = row_keys(mix_bits(keys + key), parts[:-1])
        return keep_mask(rows, parts[-1], share).view(*shape)

    def _dims(self, shape: Sequence[int]) -> list[DimPart]:
        """Return the local part of each dimension after the samples."""
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
        """Return the index of the sequence dimension after the samples: as in the input, or after the heads."""
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
        """Return `count` features or heads of this tensor rank: part `index` of `parts`."""
        tensor, tensor_index = (
            (self.mesh.size("tensor"), self.mesh.coordinate["tensor"]) if self.split == "features" else (1, 0)
        )
        start = (tensor_index * parts + index) * count
        return DimPart((range(start, start + count),), tensor * parts * count)


def _call_key(number: int) -> int:
    """Return the key of call `number` of a site: counted up for modules, down from the end for functions."""
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
    """Return the part of concatenated pieces that is in `span`."""
    result, start = list[range](), 0
    for piece in pieces:
        overlap = piece[max(0, span.start - start) : max(0, span.stop - start)]
        result += [overlap] if overlap else []
        start += len(piece)
    return tuple(result)


def _dims_of(values: DTensor) -> list[DimPart]:
    """Return the local part of each dimension after the samples of a DTensor, from its placement."""
    dims = [whole_dim(size) for size in values.shape[1:]]
    for axis, placement in enumerate(values.placements):
        if isinstance(placement, Shard) and placement.dim:
            parts, index = values.device_mesh.size(axis), values.device_mesh.get_local_rank(axis)
            size = values.shape[placement.dim]
            each = -(-size // parts)
            dims[placement.dim - 1] = DimPart((range(min(size, index * each), min(size, (index + 1) * each)),), size)
    return dims
