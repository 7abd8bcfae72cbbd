"""Tensor, context, pipeline and hybrid layouts are equal to one device.

The runs have two epochs, clipping, uneven batches, masks and tied weights.
"""

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
    # AdamW trains layouts that split its state in different ways, and test_mutations_model_parallel.py has `context`
    4: [
        "pipeline:microbatches=4",
        "fsdp:tensor=2,sequence=true,accumulate=2,recompute",
        "fsdp:context=2,accumulate=2",
        "ddp:tensor=2",
        "ddp:context=2",
        "pipeline:replicate=2,schedule=zero-bubble",
        "pipeline:tensor=2,schedule=interleaved",
    ],
}


def test_equal(ranks: Any) -> None:
    """Every layout on two ranks is compared in float64 and in float32, which has other reduction paths.

    tests/integration/test_more_ranks.py has four ranks, AdamW, compiled layouts and shards in low precision.
    """
    assert_equal(SMALL[2], parities(ranks, 2, "decoder", "sgd", SMALL[2]))


def test_low_precision_is_within_the_tolerance_band(ranks: Any) -> None:
    """bf16 differs from `single` only by rounding. fp16 skips and scales updates identically on all ranks."""
    layouts = [
        "tensor:precision=bf16",
        "context:precision=bf16",
        "pipeline:schedule=zero-bubble,precision=bf16",
        "fsdp:tensor=2,precision=bf16",
        "pipeline:precision=fp16",
        "tensor:precision=fp16",
    ]
    assert_equal(layouts, parities(ranks, 2, "decoder", "sgd", layouts))
