"""Attention over a split sequence, in one process: its numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyrank.parallel.context.apply import ContextParallel
from everyrank.parallel.context.attention import SequenceGroup


def attention(query: Tensor, key: Tensor, value: Tensor, ring: bool) -> list[Tensor]:
    """Output and gradients under autocast to bf16, of torch's own function or of a ring of one."""
    own = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    split = ContextParallel(nn.Identity(), SequenceGroup(0, 1, (0,), None), 1, "ring")
    split.length = query.shape[-2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if ring:
            with split.context():
                output = F.scaled_dot_product_attention(*own, is_causal=True)
        else:
            output = F.scaled_dot_product_attention(*own, is_causal=True)
        output.sum().backward()  # a person may do that inside, too
    return [output.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]


def test_ring_attention_under_autocast_is_as_good_as_torchs_own() -> None:
    """Scores in bf16, where float32 is meant, were three times as far from float64."""
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.randn(2, 3, 64, 16, generator=generator) for _ in range(3)]
    right = [value.double().requires_grad_() for value in values]
    output = F.scaled_dot_product_attention(*right, is_causal=True)
    output.sum().backward()
    exact = [output.detach(), *(tensor.grad for tensor in right if tensor.grad is not None)]
    for found, torchs, true in zip(attention(*values, True), attention(*values, False), exact, strict=True):
        assert found.dtype is torchs.dtype
        assert (found - true).norm() <= 1.05 * (torchs - true).norm()
