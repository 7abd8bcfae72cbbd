"""What takes more ranks, or more minutes, than the rest of the suite has: four ranks, 2 x 2 x 2, AdamW, compiled."""

from __future__ import annotations

from typing import Any

import pytest

from parity.test_equal import assert_equal, parities
from parity.test_model_parallel import SMALL

CUBES = ["pipeline:shard=2,tensor=2", "fsdp:tensor=2,context=2", "fsdp:replicate=2,tensor=2"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_by_two_by_two(ranks: Any, optimizer: str) -> None:
    """Three axes of two ranks each, in float64."""
    layouts = [f"{text},precision=float64" for text in CUBES]
    for layout in layouts:
        assert_equal([layout], parities(ranks, 8, "decoder", optimizer, [layout]))


def test_four_ranks(ranks: Any) -> None:
    """Every layout of four ranks in float64 and float32, under SGD."""
    assert_equal(SMALL[4], parities(ranks, 4, "decoder", "sgd", SMALL[4]))


@pytest.mark.parametrize("count", [2, 4])
def test_adamw_in_float32(ranks: Any, count: int) -> None:
    """In float64, and in the layouts' own precision within the band of perturbed runs of single."""
    assert_equal(SMALL[count], parities(ranks, count, "decoder", "adamw", SMALL[count]))


def test_four_stages_and_eight_micro_batches(ranks: Any) -> None:
    """All schedules on four stages, with four and with eight micro-batches."""
    layouts = [
        f"pipeline:schedule={schedule},microbatches={number},precision=float64"
        for schedule in ("gpipe", "1f1b", "zero-bubble")
        for number in (4, 8)
    ]
    assert_equal(layouts, parities(ranks, 4, "decoder", "adamw", layouts, global_batch=16))


def test_low_precision_of_shards(ranks: Any) -> None:
    """Parameters gathered in bf16, over two axes and within stages."""
    layouts = ["fsdp:tensor=2,precision=bf16", "pipeline:shard=2,precision=bf16", "fsdp:context=2,precision=fp16"]
    assert_equal(layouts, parities(ranks, 4, "decoder", "sgd", layouts, steps=4, epochs=None))


def test_compiled(ranks: Any) -> None:
    """torch.compile changes no mathematics around split matrices."""
    layouts = ["tensor:compile,precision=float64"]
    assert_equal(layouts, parities(ranks, 2, "decoder", "sgd", layouts, steps=2, epochs=None))
