"""Attention of some queries to one chunk of keys, and what is needed to merge it with that to other chunks.

torch's flash attention for CPUs does it without a matrix of all scores, in one operator forward and one backward. Its
backward takes the output and the log-sum-exp of the whole row, and so gives the gradients that belong to this chunk.
Both are private: they are used where they are there and answer as the plain operators do. Those remain for the rest:
other devices, values that are not as wide as keys, tensors without heads.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["attend", "attend_backward"]

_ATEN = torch.ops.aten
_TOLERANCE = 1e-12  # of float64


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool, dropout_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Q (B, H, Tq, W), k and v (B, G, Tk, W) -> out (B, H, Tq, W), lse (B, H, Tq): of these keys alone.

    On the `diagonal`, queries and keys are those of the same positions, and later keys are masked. `kept` (B, H, Tq,
    Tk) is what dropout multiplies the weights by; the lse is that of all of them.
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
    """Dq (B, H, Tq, W), and dk and dv side by side (B, G, Tk, 2W); out and lse are those of all keys."""
    if dropout_weights is not None or not _suits_flash(q, k, v):
        return _plain_backward(q, k, v, out, dout, lse, scale, diagonal, dropout_weights)
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, diagonal, scale=scale
    )
    return dq, torch.cat([dk, dv], dim=-1)


def _suits_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """The operator does not look at strides: torch's own `scaled_dot_product_attention` does before it calls it."""
    is_plain = all(tensor.stride(-1) == 1 and tensor.shape[-2] > 0 for tensor in (q, k, v))
    return q.device.type == "cpu" and q.dim() == 4 and k.shape[-1] == v.shape[-1] and is_plain and _flash_is_right()


@functools.cache
def _flash_is_right() -> bool:
    """Whether this torch has the two operators, and they answer as the plain ones do, of a chunk of a longer row."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, 4, generator=generator, dtype=torch.float64, device="cpu")

    q, k, v, out, dout = random(4, 6), random(2, 6), random(2, 6), random(4, 6), random(4, 6)
    try:
        for diagonal in (False, True):
            right = _plain(q, k, v, 0.5, diagonal)
            result = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal, scale=0.5)
            lse = right[1] + math.log(2)  # as if other chunks had given as much again
            dq, dkv = _plain_backward(q, k, v, out, dout, lse, 0.5, diagonal)
            grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, diagonal, scale=0.5
            )
            pairs = zip((*right, dq, *dkv.chunk(2, dim=-1)), (*result, *grads), strict=True)
            if not all(torch.allclose(value, other, rtol=_TOLERANCE, atol=_TOLERANCE) for value, other in pairs):
                return False
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another torch's, with other arguments
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
