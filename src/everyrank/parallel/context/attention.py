"""Attention over a sequence that is split over ranks, with two exact methods.

ring      Keys and values are sent around a ring; each rank adds the attention of its queries to each part, and keeps
          the logarithm of the sum of exponentials, which combines partial softmaxes. In backward they are sent around
          again and collect their gradients. Source: Liu, Zaharia and Abbeel 2023. Partial softmaxes are merged as
          in Milakov and Gimelshein 2018, and the balanced order is from Brandon et al. 2023.
ulysses   An all-to-all gives every rank whole sequences of some of the heads, torch's attention runs on them, and
          a second all-to-all reverses this. Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).

A rank holds a head and a tail: of 2N chunks, rank r has chunks r and 2N-1-r. With a causal mask every rank then has
the same work, because early queries attend to few keys and late queries to many.
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

from everyrank.parallel.context.chunk import attend, attend_backward
from everyrank.parallel.dropout.attention import KeptWeights

__all__ = ["SequenceGroup", "chunk_order", "chunk_positions", "ring_attention", "ulysses_attention"]


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a sequence: `index` of this rank among `count`, and the global `ranks` in order."""

    index: int
    count: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


def chunk_order(count: int) -> list[int]:
    """Return the chunks of the sequence in the order in which ranks hold them.

    >>> chunk_order(2)
    [0, 3, 1, 2]
    """
    return [chunk for rank in range(count) for chunk in (rank, 2 * count - 1 - rank)]


def chunk_positions(ring: SequenceGroup, rank: int, rows: slice, length: int) -> tuple[range, ...]:
    """Return the positions of some rows of a rank (of `length`) in the whole sequence, as ranges.

    >>> chunk_positions(SequenceGroup(0, 2, (0, 1), None), 0, slice(0, 4), 4)
    (range(0, 2), range(6, 8))
    """
    half = length // 2
    tail = (2 * ring.count - 1 - rank) * half
    head_part = range(rank * half, (rank + 1) * half)[rows]
    tail_part = range(tail, tail + half)[max(rows.start - half, 0) : max(rows.stop - half, 0)]
    return tuple(piece for piece in (head_part, tail_part) if piece)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    ring: SequenceGroup,
    dropout_weights: KeptWeights | None = None,
) -> Tensor:
    """Q (B, H, T/N, W), k and v (B, G, T/N, W) with G heads that divide H -> (B, H, T/N, W).

    `dropout_weights` returns the dropout factors of the attention weights of a chunk.
    """
    out: Tensor = _RingAttention.apply(q, k, v, causal, scale, ring, dropout_weights)  # pyright: ignore
    return out


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast, because it would compute scores in low precision."""

    @functools.wraps(method)
    def in_full(ctx: Any, *arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return method(ctx, *arguments)

    return in_full


class _RingAttention(torch.autograd.Function):
    """The ring, with the names of the paper: lse is the logarithm of the sum of exponentials of a query's scores."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        ring: SequenceGroup,
        dropout_weights: KeptWeights | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        q_wide = q.to(wide)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)  # (B, H, T/N, W)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)  # (B, H, T/N)
        kv = torch.cat([k, v], dim=-1)
        for step in range(ring.count):
            source = (ring.index - step) % ring.count
            # the next part arrives while this one is used
            receive = ring_send_recv(kv, ring) if step < ring.count - 1 else None
            k_step, v_step = kv.to(wide).split([k.shape[-1], v.shape[-1]], dim=-1)
            for rows, columns, diagonal in _chunk_pairs(ring, source, q.shape[-2], causal):
                mask = _kept_of_chunk(dropout_weights, ring, source, rows, columns, q.shape[-2])
                out_part, lse_part = attend(
                    q_wide[..., rows, :], k_step[..., columns, :], v_step[..., columns, :], scale, diagonal, mask
                )
                lse_new = torch.logaddexp(lse[..., rows], lse_part)
                out[..., rows, :] = (
                    out[..., rows, :] * (lse[..., rows] - lse_new).exp()[..., None]
                    + out_part * (lse_part - lse_new).exp()[..., None]
                )
                lse[..., rows] = lse_new
            if receive is not None:
                kv = receive()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = causal, scale, ring, dropout_weights
        return out

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale, ring, dropout_weights = ctx.settings
        wide = lse.dtype
        q_wide, out_wide, dout = q.to(wide), out.to(wide), grads[0].to(wide)
        dq = torch.zeros_like(q_wide)
        kv = torch.cat([k, v], dim=-1)
        dkv = torch.zeros_like(kv, dtype=wide)  # gradients of the current keys and values
        receive_grads: Callable[[], Tensor] | None = None
        for step in range(ring.count):
            source = (ring.index - step) % ring.count
            receive = ring_send_recv(kv, ring) if step < ring.count - 1 else None
            dkv = torch.zeros_like(dkv) if step else dkv  # those of the previous step are being sent
            k_step, v_step = kv.to(wide).split([k.shape[-1], v.shape[-1]], dim=-1)
            for rows, columns, diagonal in _chunk_pairs(ring, source, q.shape[-2], causal):
                dq_part, dkv_part = attend_backward(
                    q_wide[..., rows, :],
                    k_step[..., columns, :],
                    v_step[..., columns, :],
                    out_wide[..., rows, :],
                    dout[..., rows, :],
                    lse[..., rows],
                    scale,
                    diagonal,
                    _kept_of_chunk(
                        dropout_weights, ring, source, rows, columns, q.shape[-2]
                    ),  # the same mask as in forward
                )
                dq[..., rows, :] += dq_part
                dkv[..., columns, :] += dkv_part
            if receive is not None:
                kv = receive()
            if receive_grads is not None:
                dkv += receive_grads()  # gradients of the previous ranks, which arrived meanwhile
            if ring.count > 1:
                receive_grads = ring_send_recv(dkv, ring)
        if receive_grads is not None:
            dkv = receive_grads()  # returned to this rank
        dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _kept_of_chunk(
    dropout_weights: KeptWeights | None, ring: SequenceGroup, source: int, rows: slice, columns: slice, length: int
) -> Tensor | None:
    """Return the factor of dropout for the weights of these queries and keys; None without dropout."""
    if dropout_weights is None:
        return None
    queries = chunk_positions(ring, ring.index, rows, length)
    return dropout_weights(queries, chunk_positions(ring, source, columns, length))


def _chunk_pairs(ring: SequenceGroup, source: int, length: int, causal: bool) -> list[tuple[slice, slice, bool]]:
    """Return (queries, keys, whether they are the same chunk) for each pair of chunks that is not masked.

    The keys are those of rank `source`; slices refer to the local parts of this rank and of `source`.
    """
    if not causal:
        return [(slice(0, length), slice(0, length), False)]
    half = length // 2
    head, tail = slice(0, half), slice(half, length)
    if source == ring.index:
        return [(head, head, True), (tail, head, False), (tail, tail, True)]
    if source < ring.index:  # its head is before our chunks, its tail after them
        return [(head, head, False), (tail, head, False)]
    return [(tail, head, False), (tail, tail, False)]


def ring_send_recv(tensor: Tensor, ring: SequenceGroup) -> Callable[[], Tensor]:
    """Start sending to the next rank; return a function that waits for the previous rank's tensor and returns it."""
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


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    ring: SequenceGroup,
    dropout_weights: KeptWeights | None = None,
) -> Tensor:
    """Q (B, H, T/N, W), k and v (B, G, T/N, W) -> (B, H, T/N, W); N has to divide the heads.

    `dropout_weights` returns the dropout factors of the attention weights.
    """
    q, k, v = (_to_heads(tensor, ring) for tensor in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    if dropout_weights is not None:
        everywhere, wide = (range(q.shape[-2]),), torch.promote_types(q.dtype, torch.float32)
        out, _ = attend(q.to(wide), k.to(wide), v.to(wide), scale, causal, dropout_weights(everywhere, everywhere))
        return _to_sequence(out.to(q.dtype), ring)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=is_grouped)
    return _to_sequence(out, ring)


def _to_heads(tensor: Tensor, ring: SequenceGroup) -> Tensor:
    """(B, H, T/N, W), a head and a tail of the sequence -> (B, H/N, T, W), all of it in order."""
    parts: Tensor = _AllToAll.apply(torch.stack(tensor.chunk(ring.count, dim=1)), ring)  # pyright: ignore
    chunks = [chunk for of_rank in parts.unbind() for chunk in of_rank.chunk(2, dim=-2)]
    order = chunk_order(ring.count)
    return torch.cat([chunks[order.index(position)] for position in range(2 * ring.count)], dim=-2)


def _to_sequence(tensor: Tensor, ring: SequenceGroup) -> Tensor:
    """(B, H/N, T, W), all of the sequence in order -> (B, H, T/N, W), a head and a tail of it."""
    chunks = tensor.chunk(2 * ring.count, dim=-2)
    order = chunk_order(ring.count)
    parts = [torch.cat([chunks[order[2 * rank]], chunks[order[2 * rank + 1]]], dim=-2) for rank in range(ring.count)]
    exchanged: Tensor = _AllToAll.apply(torch.stack(parts), ring)  # pyright: ignore
    return torch.cat(list(exchanged.unbind()), dim=1)


class _AllToAll(torch.autograd.Function):
    """Exchange parts (N, ...): part i is sent to rank i of the group; backward exchanges gradients in reverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ring: SequenceGroup) -> Tensor:
        ctx.ring = ring
        return _all_to_all(parts, ring)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyright: ignore
        return _all_to_all(grads[0], ctx.ring), None


def _all_to_all(parts: Tensor, ring: SequenceGroup) -> Tensor:
    if ring.count == 1:
        return parts
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=ring.group)
    return received
