"""Tensor, context, pipeline and hybrid layouts equal one device: two epochs, clipping, ragged batches, masks, a tie."""

from __future__ import annotations

from typing import Any

import pytest

from parity.test_equal import assert_equal, parities

pytestmark = pytest.mark.integration

SMALL = {
    2: [
        "tensor",
        "tensor:sequence=true,accumulate=2,recompute",
        "context",
        "context:method=ulysses,accumulate=2,recompute",
        "pipeline",
        "pipeline:schedule=gpipe,recompute",
        "pipeline:schedule=interleaved,accumulate=2",
        "pipeline:schedule=zero-bubble",
        "fsdp:tensor=2",
        "fsdp:context=2",
    ],
    4: [
        "tensor",
        "context",
        "pipeline:microbatches=4",
        "fsdp:replicate=2",
        "fsdp:tensor=2",
        "fsdp:tensor=2,sequence=true,accumulate=2,recompute",
        "fsdp:context=2,accumulate=2",
        "ddp:tensor=2",
        "ddp:context=2",
        "fsdp:tensor=2,context=2",
        "pipeline:shard=2",
        "pipeline:replicate=2,schedule=zero-bubble",
        "pipeline:tensor=2,schedule=interleaved",
    ],
}


def test_equal(ranks: Any) -> None:
    """Every layout of two ranks in float64 and float32, which takes other reduction paths.

    Those of four, AdamW, compiled ones and shards in low precision are in tests/integration/test_more_ranks.py.
    """
    assert_equal(SMALL[2], parities(ranks, 2, "decoder", "sgd", SMALL[2]))


def test_low_precision_stays_in_the_band(ranks: Any) -> None:
    """bf16 is as far from single as rounding is, and fp16 skips and scales alike on all ranks."""
    layouts = [
        "tensor:precision=bf16",
        "context:precision=bf16",
        "pipeline:schedule=zero-bubble,precision=bf16",
        "fsdp:tensor=2,precision=bf16",
        "pipeline:precision=fp16",
        "tensor:precision=fp16",
    ]
    assert_equal(layouts, parities(ranks, 2, "decoder", "sgd", layouts))
