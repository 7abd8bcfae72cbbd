"""Attention over a sequence that is split over ranks: two ways, both exact.

ring      Keys and values go round; each rank adds to its own queries what every part of the sequence gives, and keeps
          the logarithm of the sum of exponentials, by which partial softmaxes are put together. In backward they go
          round once more, and collect their gradients on the way home. Source: Liu, Zaharia and Abbeel 2023; the
          merging of partial softmaxes is Milakov and Gimelshein 2018, the balanced order Brandon et al. 2023.
ulysses   An all-to-all gives every rank whole sequences of some of the heads, ordinary attention runs on them, and
          another all-to-all gives them back. Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).

A rank holds a head and a tail: of 2N chunks, rank r has chunk r and chunk 2N-1-r, one after the other. Under a causal
mask every rank then has the same work: early queries look at little, late ones at much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Ring", "chunk_order", "ring_attention", "ulysses_attention"]


@dataclass(frozen=True)
class Ring:
    """The ranks that share a sequence: `index` of `count`, and the world's numbers of all of them, in order."""

    index: int
    count: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


def chunk_order(count: int) -> list[int]:
    """The chunks of the sequence as the ranks hold them, one rank after the other.

    >>> chunk_order(2)
    [0, 3, 1, 2]
    """
    return [chunk for rank in range(count) for chunk in (rank, 2 * count - 1 - rank)]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, ring: Ring) -> Tensor:
    """(B, H, T/N, W) each, with as many or fewer heads of keys and values -> (B, H, T/N, W)."""
    output: Tensor = _RingAttention.apply(query, key, value, causal, scale, ring)  # pyright: ignore
    return output


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Scores are wide on purpose: autocast would give every product its low precision back."""

    @functools.wraps(method)
    def in_full(ctx: Any, *arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return method(ctx, *arguments)

    return in_full


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, ring: Ring) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        own = query.to(wide)
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=wide, device=query.device)
        logsum = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        travelling = torch.cat([key, value], dim=-1)
        for step in range(ring.count):
            source = (ring.index - step) % ring.count
            # the next part comes while this one is computed with
            waiting = _pass_on(travelling, ring) if step < ring.count - 1 else None
            keys, values = travelling.to(wide).split([key.shape[-1], value.shape[-1]], dim=-1)
            for rows, columns, diagonal in _pairs(ring, source, own.shape[-2], causal):
                part, part_logsum = _attend(
                    own[..., rows, :], keys[..., columns, :], values[..., columns, :], scale, diagonal
                )
                total = torch.logaddexp(logsum[..., rows], part_logsum)
                output[..., rows, :] = (
                    output[..., rows, :] * (logsum[..., rows] - total).exp()[..., None]
                    + part * (part_logsum - total).exp()[..., None]
                )
                logsum[..., rows] = total
            if waiting is not None:
                travelling = waiting()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsum)
        ctx.settings = causal, scale, ring
        return output

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, output, logsum = ctx.saved_tensors
        causal, scale, ring = ctx.settings
        wide = logsum.dtype
        own, grad = query.to(wide), grads[0].to(wide)
        delta = (grad * output.to(wide)).sum(-1)
        grad_query = torch.zeros_like(own)
        travelling = torch.cat([key, value], dim=-1)
        collected = torch.zeros_like(travelling, dtype=wide)  # gradients of the keys and values that are here now
        for step in range(ring.count):
            source = (ring.index - step) % ring.count
            waiting = _pass_on(travelling, ring) if step < ring.count - 1 else None
            keys, values = travelling.to(wide).split([key.shape[-1], value.shape[-1]], dim=-1)
            for rows, columns, diagonal in _pairs(ring, source, own.shape[-2], causal):
                to_query, to_both = _attend_backward(
                    own[..., rows, :],
                    keys[..., columns, :],
                    values[..., columns, :],
                    grad[..., rows, :],
                    logsum[..., rows],
                    delta[..., rows],
                    scale,
                    diagonal,
                )
                grad_query[..., rows, :] += to_query
                collected[..., columns, :] += to_both
            if waiting is not None:
                travelling = waiting()
            if ring.count > 1:
                collected = _pass_on(collected, ring)()  # at the last step they come home
        grad_key, grad_value = collected.split([key.shape[-1], value.shape[-1]], dim=-1)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _pairs(ring: Ring, source: int, length: int, causal: bool) -> list[tuple[slice, slice, bool]]:
    """(queries, keys, whether they are the same chunk) for each pair of chunks in which something is to be computed."""
    if not causal:
        return [(slice(0, length), slice(0, length), False)]
    half = length // 2
    head, tail = slice(0, half), slice(half, length)
    if source == ring.index:
        return [(head, head, True), (tail, head, False), (tail, tail, True)]
    if source < ring.index:  # its head is before both of ours, its tail behind both
        return [(head, head, False), (tail, head, False)]
    return [(tail, head, False), (tail, tail, False)]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Attention to one chunk: the output, and the logarithm of the sum of exponentials."""
    scores = _scores(query, key, scale, diagonal)
    logsum = scores.logsumexp(-1)
    return (scores - logsum[..., None]).exp() @ _for_heads(value, query.shape[1]), logsum


def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    logsum: Tensor,
    delta: Tensor,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of keys and values side by side."""
    heads, shared = query.shape[1], key.shape[1]
    weights = (_scores(query, key, scale, diagonal) - logsum[..., None]).exp()
    to_value = weights.transpose(-1, -2) @ grad
    through = weights * (grad @ _for_heads(value, heads).transpose(-1, -2) - delta[..., None]) * scale
    to_key = through.transpose(-1, -2) @ query
    both = torch.cat([to_key, to_value], dim=-1)
    if heads != shared:
        both = both.unflatten(1, (shared, heads // shared)).sum(2)
    return through @ _for_heads(key, heads), both


def _scores(query: Tensor, key: Tensor, scale: float, diagonal: bool) -> Tensor:
    scores = query @ _for_heads(key, query.shape[1]).transpose(-1, -2) * scale
    if diagonal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def _for_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values that several heads of queries share, repeated for each."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _pass_on(tensor: Tensor, ring: Ring) -> Any:
    """Start handing `tensor` to the next rank; what is returned waits for what the rank before hands on."""
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    following = ring.ranks[(ring.index + 1) % ring.count]
    before = ring.ranks[(ring.index - 1) % ring.count]
    operations = [
        dist.P2POp(dist.isend, sent, following, ring.group),
        dist.P2POp(dist.irecv, received, before, ring.group),
    ]
    works = dist.batch_isend_irecv(operations)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, ring: Ring) -> Tensor:
    """(B, H, T/N, W) each -> (B, H, T/N, W); the heads have to divide by N."""
    query, key, value = (_to_heads(tensor, ring) for tensor in (query, key, value))
    shares = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=shares)
    return _to_sequence(output, ring)


def _to_heads(tensor: Tensor, ring: Ring) -> Tensor:
    """(B, H, T/N, W), a head and a tail of the sequence -> (B, H/N, T, W), all of it in order."""
    parts: Tensor = _Exchange.apply(torch.stack(tensor.chunk(ring.count, dim=1)), ring)  # pyright: ignore
    chunks = [chunk for part in parts.unbind() for chunk in part.chunk(2, dim=-2)]
    order = chunk_order(ring.count)
    return torch.cat([chunks[order.index(place)] for place in range(2 * ring.count)], dim=-2)


def _to_sequence(tensor: Tensor, ring: Ring) -> Tensor:
    """The way back."""
    chunks = tensor.chunk(2 * ring.count, dim=-2)
    order = chunk_order(ring.count)
    parts = [torch.cat([chunks[order[2 * rank]], chunks[order[2 * rank + 1]]], dim=-2) for rank in range(ring.count)]
    exchanged: Tensor = _Exchange.apply(torch.stack(parts), ring)  # pyright: ignore
    return torch.cat(list(exchanged.unbind()), dim=1)


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i of the ring, and its part for us comes; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _exchange(parts, ring)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyright: ignore
        return _exchange(grads[0], ctx.ring), None


def _exchange(parts: Tensor, ring: Ring) -> Tensor:
    if ring.count == 1:
        return parts
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=ring.group)
    return received
