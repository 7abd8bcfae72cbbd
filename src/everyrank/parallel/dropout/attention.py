"""Dropout of attention weights, with a mask that depends on sample, head, query and key.

Torch's kernels draw the mask inside, so attention with dropout is implemented here. It needs the matrix of all weights
of a layer, (B, H, T, T), like torch's own implementation without flash attention.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everyrank.parallel.dropout.exact import ExactDropout
from everyrank.parallel.dropout.masks import DimPart, dropped_share, keep_mask, mix_bits, row_keys

__all__ = ["KeptWeights", "attention_with_dropout", "kept_weights", "multi_head_attention_with"]

KeptWeights = Callable[[tuple[range, ...], tuple[range, ...]], Tensor]
"""(positions of queries, of keys) -> factors of their weights, (B, H, Tq, Tk): 0 or 1 / (1 - p)."""


def attention_with_dropout(
    exact: ExactDropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the mask of this call: (..., Tq, W) -> (..., Tq, W)."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = attn_mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
    weights = scores.softmax(-1)
    if seen is not None and seen.dtype == torch.bool:
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)  # a query that attends to nothing
    dropped = exact.drop(weights, dropout_p, exact.function_key())
    return dropped.to(value.dtype) @ value


def kept_weights(exact: ExactDropout, like: Tensor, heads: DimPart | None, length: int, p: float) -> KeptWeights:
    """Return the mask of this call of attention, for code that computes it chunk by chunk over `length` positions.

    `like` has the dtype and device; `heads` is None if queries are (B, T, W).
    """
    share, keys = dropped_share(p), mix_bits(exact.keys + exact.function_key())

    def of(queries: tuple[range, ...], columns: tuple[range, ...]) -> Tensor:
        rows = row_keys(keys, [*([heads] if heads else []), DimPart(queries, length)])
        keep = keep_mask(rows, DimPart(columns, length), share)
        return keep.to(torch.promote_types(like.dtype, torch.float32)) * (1 / (1 - share) if share < 1 else 0.0)

    return of


def multi_head_attention_with(dropout: Callable[..., Any], attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's multi_head_attention_forward with these functions in place of those that draw masks."""
    implementation: Any = F.multi_head_attention_forward
    names = {"dropout": dropout, "scaled_dot_product_attention": attention, "has_torch_function": lambda _: False}
    made = types.FunctionType(
        implementation.__code__,
        {**implementation.__globals__, **names},
        implementation.__name__,
        implementation.__defaults__,
    )
    made.__kwdefaults__ = implementation.__kwdefaults__
    return made
