"""Tensor, context and hybrid layouts equal one device: two epochs, clipping, ragged batches, masked targets, a tie."""

from __future__ import annotations

from typing import Any

import pytest

from parity.test_equal import assert_equal, parities

HYBRIDS = {
    2: ["tensor", "tensor:sequence=true", "context", "context:method=ulysses", "fsdp:tensor=2", "fsdp:context=2"],
    4: [
        "tensor",
        "context",
        "fsdp:replicate=2",
        "fsdp:tensor=2",
        "fsdp:context=2",
        "ddp:tensor=2",
        "ddp:context=2",
        "fsdp:tensor=2,context=2",
        "ddp:tensor=2,context=2",
    ],
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [2, 4])
def test_equal(ranks: Any, count: int, optimizer: str) -> None:
    """Every layout, in float64 and in float32 (other reduction paths)."""
    assert_equal(HYBRIDS[count], parities(ranks, count, "decoder", optimizer, HYBRIDS[count]))
