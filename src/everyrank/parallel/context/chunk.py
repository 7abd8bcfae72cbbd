"""Attention of some queries to one chunk of keys, with the log-sum-exp that merges it with other chunks.

torch's flash attention for CPUs computes it without a matrix of all scores, in one operator in forward and one in
backward. The backward takes output and log-sum-exp of the whole row, and so returns the gradients for this chunk. Both
operators are private: they are used if they exist and agree with plain operators. Plain operators are used otherwise:
on other devices, if values and keys differ in width, and for tensors without heads.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["attend", "attend_backward"]

_ATEN = torch.ops.aten
_TOLERANCE = 1e-12  # for float64


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool, dropout_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Q (B, H, Tq, W), k and v (B, G, Tk, W) -> out (B, H, Tq, W), lse (B, H, Tq), over these keys only.

    On the `diagonal`, queries and keys are those of the same positions, and later keys are masked. `kept` (B, H, Tq,
    Tk) is the factor of dropout for the weights; the lse is computed without dropout.
    """
    if dropout_weights is None and _suits_flash(q, k, v):
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal, scale=scale)
    return _plain(q, k, v, scale, diagonal, dropout_weights)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
    dropout_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dq (B, H, Tq, W), and dk and dv concatenated (B, G, Tk, 2W); out and lse are over all keys."""
    if dropout_weights is not None or not _suits_flash(q, k, v):
        return _plain_backward(q, k, v, out, dout, lse, scale, diagonal, dropout_weights)
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, diagonal, scale=scale
    )
    return dq, torch.cat([dk, dv], dim=-1)


def _suits_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operator supports these tensors. It does not check strides itself, so they are checked here."""
    is_plain = all(tensor.stride(-1) == 1 and tensor.shape[-2] > 0 for tensor in (q, k, v))
    return q.device.type == "cpu" and q.dim() == 4 and k.shape[-1] == v.shape[-1] and is_plain and _flash_is_right()


@functools.cache
def _flash_is_right() -> bool:
    """Whether this torch has both operators, and they agree with plain operators for a chunk of a longer row."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, 4, generator=generator, dtype=torch.float64, device="cpu")

    q, k, v, out, dout = random(4, 6), random(2, 6), random(2, 6), random(4, 6), random(4, 6)
    try:
        for diagonal in (False, True):
            right = _plain(q, k, v, 0.5, diagonal)
            result = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal, scale=0.5)
            lse = right[1] + math.log(2)  # as if other chunks had an equal sum of exponentials
            dq, dkv = _plain_backward(q, k, v, out, dout, lse, 0.5, diagonal)
            grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, diagonal, scale=0.5
            )
            pairs = zip((*right, dq, *dkv.chunk(2, dim=-1)), (*result, *grads), strict=True)
            if not all(torch.allclose(value, other, rtol=_TOLERANCE, atol=_TOLERANCE) for value, other in pairs):
                return False
    except (AttributeError, RuntimeError, TypeError, ValueError):  # a torch version with other arguments
        return False
    return True


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool, dropout_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, diagonal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    return (p if dropout_weights is None else p * dropout_weights) @ _repeat_heads(v, q.shape[1]), lse


def _plain_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
    dropout_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    delta = (dout * out).sum(-1, keepdim=True)  # (B, H, Tq, 1)
    p = (_scores(q, k, scale, diagonal) - lse[..., None]).exp()  # the probabilities, (B, H, Tq, Tk)
    dp = dout @ _repeat_heads(v, heads).transpose(-1, -2)
    dv = (p if dropout_weights is None else p * dropout_weights).transpose(-1, -2) @ dout
    ds = p * ((dp if dropout_weights is None else dp * dropout_weights) - delta) * scale
    dk = ds.transpose(-1, -2) @ q
    dkv = torch.cat([dk, dv], dim=-1)
    if heads != kv_heads:
        dkv = dkv.unflatten(1, (kv_heads, heads // kv_heads)).sum(2)
    return ds @ _repeat_heads(k, heads), dkv


def _scores(q: Tensor, k: Tensor, scale: float, diagonal: bool) -> Tensor:
    """(B, H, Tq, Tk); on the `diagonal` later keys are masked."""
    scores = q @ _repeat_heads(k, q.shape[1]).transpose(-1, -2) * scale
    if diagonal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, T, W) that several heads of queries share, repeated for each: (B, H, T, W)."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
