"""Mixtures of experts equal one device, whichever ranks their experts are on."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from parity.test_equal import assert_equal, parities

LAYOUTS = {
    2: [
        "ddp",
        "expert",
        "expert:accumulate=3,recompute",
        "fsdp:expert=2",
        "fsdp:expert=2,accumulate=2,reshard_after_forward=false",
    ],
    4: [
        "expert",
        "ddp:expert=2",
        "ddp:expert=2,accumulate=2",
        "fsdp:expert=2",
        "fsdp:expert=2,recompute",
        "fsdp:expert=4",
        "fsdp:replicate=2,expert=2",
        "fsdp:expert=2,tensor=2",
        "ddp:expert=2,tensor=2",
        "ddp:expert=2,context=2",
        "fsdp:expert=2,context=2",
        "fsdp:expert=2,meta",
    ],
}


def test_equal(ranks: Any) -> None:
    """Top 2 of 4 experts on two ranks: ragged batches, masks, micro-batches, recomputation, clipping."""
    assert_equal(LAYOUTS[2], parities(ranks, 2, "experts", "sgd", LAYOUTS[2]))


def test_equal_with_few_tokens(ranks: Any) -> None:
    """Top 1 of 8 experts: in many an update experts, and ranks, get no token."""
    layouts = ["expert", "fsdp:expert=2,accumulate=3"]
    assert_equal(layouts, parities(ranks, 2, "experts", "adamw", layouts, model=zoo.one_of_eight_experts))


@pytest.mark.integration
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equal_on_more_ranks(ranks: Any, optimizer: str) -> None:
    """The hybrids."""
    assert_equal(LAYOUTS[4], parities(ranks, 4, "experts", optimizer, LAYOUTS[4]))
