"""Split the sequences of a batch over ranks; attention spans all ranks (attention.py).

All other layers have to treat each position independently, and positions have to be a part of the input. Violations are
refused if they can be detected: attention with a mask, attention that does not call F.scaled_dot_product_attention, and
positions from `torch.arange` or a slice of a buffer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import ContextOptions
from everyrank.parallel.context.attention import (
    SequenceGroup,
    chunk_order,
    chunk_positions,
    ring_attention,
    ulysses_attention,
)
from everyrank.parallel.dropout.attention import KeptWeights, kept_weights
from everyrank.parallel.dropout.exact import ExactDropout
from everyrank.parallel.mesh import Mesh
from everyrank.workload import Workload

__all__ = ["ContextParallel", "apply_context_parallel"]

_METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


class ContextParallel:
    """The two chunks of every sequence on this rank: one of the first half and one of the second half.

    context   entered around forward, loss and backward; attention in it spans all ranks
    """

    def __init__(
        self, model: nn.Module, group: SequenceGroup, dim: int, method: str, dropout: ExactDropout | None = None
    ) -> None:
        self.group, self.dim, self.method, self.dropout = group, dim, method, dropout
        self.model = model
        self.length = 0  # positions of this rank
        self.num_attentions = 0
        self.is_checked = False

    def context(self) -> TorchFunctionMode:
        """Return the mode that intercepts calls of attention."""
        return _Attention(self)

    def is_of_model(self, tensor: Tensor) -> bool:
        """Whether a tensor is a current parameter or buffer of the model (FSDP replaces them)."""
        return any(tensor is known for known in (*self.model.parameters(), *self.model.buffers()))

    @property
    def local_positions(self) -> tuple[range, ...]:
        """Return the positions of this rank's two chunks in the whole sequence."""
        return chunk_positions(self.group, self.group.index, slice(0, self.length), self.length)

    def take(self, batch: Batch) -> Batch:
        """Return this rank's part of the sequences of a batch.

        Raises `UnsupportedLayoutError` if the length is not a multiple of 2 x ranks, or if no tensor of the input or of
        the target has the sequence.
        """
        lengths: list[int] = []
        map_tensors(batch.input, lambda t: lengths.append(t.shape[self.dim]) or t if t.dim() > self.dim else t)
        if not lengths:
            raise UnsupportedLayoutError(f"sequence_dim={self.dim}: no tensor of the input has such a dimension")
        if lengths[0] % (2 * self.group.count):
            raise UnsupportedLayoutError(
                f"a sequence of {lengths[0]} does not divide into {2 * self.group.count} chunks, two for each of "
                f"context={self.group.count} ranks; pad it to a multiple"
            )
        self.length = lengths[0] // self.group.count
        split_tensors: list[bool] = []

        def local_part(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != lengths[0]:
                return tensor
            split_tensors.append(True)
            chunks = tensor.chunk(2 * self.group.count, dim=self.dim)
            local_chunks = chunk_order(self.group.count)[2 * self.group.index : 2 * self.group.index + 2]
            return torch.cat([chunks[chunk] for chunk in local_chunks], dim=self.dim)

        inputs = map_tensors(batch.input, local_part)
        num_inputs = len(split_tensors)
        target = map_tensors(batch.target, local_part)
        if len(split_tensors) == num_inputs:
            raise UnsupportedLayoutError(
                "context: no tensor of the target has the length of the sequence; context parallelism needs a target "
                "for each position"
            )
        return dataclasses.replace(batch, input=inputs, target=target)

    def gather_output(self, output: Any) -> Any:
        """Gather an output along the sequence from all ranks. A collective."""

        def gathered(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.length:
                return tensor
            rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.group.count)]
            dist.all_gather(rows, tensor.contiguous(), group=self.group.group)
            chunks = [chunk for row in rows for chunk in row.chunk(2, dim=self.dim)]
            order = chunk_order(self.group.count)
            return torch.cat([chunks[order.index(position)] for position in range(len(chunks))], dim=self.dim)

        return map_tensors(output, gathered) if self.group.count > 1 else output

    def check(self) -> None:
        """After a forward pass: raise `UnsupportedLayoutError` if no call of attention was seen."""
        if not self.is_checked and self.num_attentions == 0:
            raise UnsupportedLayoutError(
                "context: the model calls no torch.nn.functional.scaled_dot_product_attention, so that its attention "
                "would end at this rank's part of the sequence; use that function"
            )
        self.is_checked = True


class _Attention(TorchFunctionMode):
    """Replaces attention over the local part by attention over all ranks."""

    def __init__(self, parallel: ContextParallel) -> None:
        super().__init__()
        self.parallel = parallel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.parallel.num_attentions += 1
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UnsupportedLayoutError(
                "context: nn.MultiheadAttention looks only at this rank's part of the sequence; use linear layers and "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        result = func(*args, **kwargs)
        if not self.parallel.is_checked and self._counts_positions(func, args, result):
            raise UnsupportedLayoutError(
                f"context: the model counts {self.parallel.length} positions itself ({func.__name__}), but this rank "
                "has a part of the sequence; make positions a part of the input"
            )
        return result

    def _counts_positions(self, func: Any, args: Any, result: Any) -> bool:
        length = self.parallel.length
        if func is torch.arange:  # only integers: real numbers are frequencies
            return not result.is_floating_point() and len(result) == length
        if func is Tensor.__getitem__:
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            slices_positions = any(isinstance(key, slice) and key.stop == length and not key.start for key in keys)
            return slices_positions and self.parallel.is_of_model(args[0])
        return False

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self._check(query, key, attn_mask, dropout_p, enable_gqa)
        factor = scale if scale is not None else query.shape[-1] ** -0.5
        # autocast casts the inputs of torch's function; cast them for our function, too
        query, key, value = _autocast(query, key, value)
        dropout_weights = self._kept_weights(query, dropout_p) if dropout_p else None
        return _METHODS[self.parallel.method](
            query, key, value, is_causal, factor, self.parallel.group, dropout_weights
        )

    def _kept_weights(self, query: Tensor, dropout_p: float) -> KeptWeights:
        """Return the dropout mask of this call, for the local heads and any positions of the sequence."""
        exact, group = self.parallel.dropout, self.parallel.group
        assert exact is not None
        heads = exact.features_here(query.shape[1]) if query.dim() == 4 else None
        if self.parallel.method == "ulysses":
            heads = exact.features_here(query.shape[1] // group.count, group.index, group.count)
        return kept_weights(exact, query, heads, self.parallel.length * group.count, dropout_p)

    def _check(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool) -> None:
        """Raise `UnsupportedLayoutError` for attention that is not self-attention over the sequence."""
        if attn_mask is not None:
            raise UnsupportedLayoutError(
                "context: attention with a mask, which is made of only this rank's positions; "
                "use is_causal=True, or no mask"
            )
        if dropout_p and self.parallel.dropout is None:
            raise UnsupportedLayoutError(
                f"context: attention with dropout {dropout_p}; set it to 0, or Workload.dropout='exact'"
            )
        if dropout_p and self.parallel.dropout is not None and len(query) != len(self.parallel.dropout.keys):
            raise UnsupportedLayoutError(
                "context: attention with dropout needs a query for each of the "
                f"{len(self.parallel.dropout.keys)} samples, but the first dimension of the queries is {len(query)}; "
                "give queries of shape (samples, heads, positions, width)"
            )
        if key.shape[-2] != query.shape[-2] or query.shape[-2] != self.parallel.length:
            raise UnsupportedLayoutError(
                f"context: attention of {query.shape[-2]} queries to {key.shape[-2]} keys, where this rank has "
                f"{self.parallel.length} positions; it has to be attention of the sequence to itself"
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise UnsupportedLayoutError(
                f"attention of {query.shape[1]} heads to {key.shape[1]} without enable_gqa=True"
            )
        if self.parallel.method == "ulysses":
            if query.dim() != 4:
                raise UnsupportedLayoutError(
                    "context: ulysses needs queries of shape (samples, heads, positions, width), but got "
                    f"{tuple(query.shape)}; use method=ring"
                )
            num_ranks = self.parallel.group.count
            for heads in (query.shape[1], key.shape[1]):
                if heads % num_ranks:
                    raise UnsupportedLayoutError(
                        f"context: {heads} heads do not divide by context={num_ranks}; use method=ring"
                    )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [tensor.to(dtype) if tensor.dtype is torch.float32 else tensor for tensor in tensors]


def apply_context_parallel(
    model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh, dropout: ExactDropout | None = None
) -> ContextParallel | None:
    """Split sequences over the context axis; None if the axis has one rank. `dropout` is that of the model.

    Raises `UnsupportedLayoutError` for a workload without `sequence_dim`.
    """
    count = mesh.size("context")
    if count == 1:
        return None
    if workload.sequence_dim is None:
        raise UnsupportedLayoutError(
            f"workload {workload.name} has no sequence_dim, the dimension of the input that is the sequence; "
            "for tokens of shape (B, T) it is 1"
        )
    ranks = tuple(mesh.rank_at(context=index) for index in range(count))
    group = SequenceGroup(mesh.coordinate["context"], count, ranks, mesh.group("context"))
    return ContextParallel(model, group, workload.sequence_dim, layout.read(ContextOptions).method, dropout)
