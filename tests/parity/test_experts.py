"""Mixtures of experts equal one device, whichever ranks their experts are on."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from everyrank import EveryrankError, parse_layout
from everyrank.errors import LayoutError
from everyrank.strategies import prepare
from everyrank.world import World
from parity.test_equal import assert_equal, in_float64, parities

pytestmark = pytest.mark.integration

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


def test_equal_without_tokens(ranks: Any) -> None:
    """One expert gets all tokens: the other rank takes part in backward, and has gradients of zero."""
    layouts = ["expert", "expert:recompute,accumulate=2", "fsdp:expert=2"]
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts, model=zoo.one_expert_for_all))


def test_equal_otherwise(ranks: Any) -> None:
    """Whole experts under all other strategies; and in low precision within the band of rounding."""
    layouts = ["zero1", "fsdp", "tensor", "context", "pipeline", "expert:precision=bf16"]
    layouts += ["fsdp:expert=2,precision=bf16", "expert:precision=fp16"]
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts))


def test_compiled(ranks: Any) -> None:
    """Around experts whose rows are known only at run time."""
    layouts = ["expert:compile,precision=float64"]
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts, steps=2, epochs=None))


def refusals(world: World, layout: str, changes: dict[str, Any]) -> str:
    try:
        prepare(zoo.workload("experts", **changes), parse_layout(layout), world)
    except EveryrankError as error:
        return f"{error.exit_status} {error}"
    return ""


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        ("expert", {"model": zoo.three_experts}, "blocks.0.feed.experts has 3 experts"),
        ("expert", {"model": zoo.one_expert}, "give expert=1 at most"),
        ("ddp:expert=2", {"experts": None}, "workload experts has no experts"),
        ("fsdp:expert=2", {"experts": "layers.*"}, "experts='layers.*' matches no module"),
        ("expert", {"experts": "blocks.*.feed"}, "blocks.0.feed "),
        ("expert", {"experts": "blocks.*"}, "no first dimension in common"),
        ("tensor:sequence=true", {}, "leave out sequence"),
        ("fsdp:expert=3", {}, "give --processes 3"),
    ],
)
def test_what_cannot_be_laid_out(ranks: Any, layout: str, changes: dict[str, Any], says: str) -> None:
    """One line and status 2, on every rank."""
    for found in ranks(2, refusals, layout, changes):
        assert found.startswith("2 ")
        assert says in found
        assert "\n" not in found


@pytest.mark.parametrize("layout", ["ddp:expert=2,compress=fp16", "ddp:expert=2,batch_norm=local", "zero1:expert=2"])
def test_what_does_not_go_together(layout: str) -> None:
    """Refused before anything starts."""
    with pytest.raises(LayoutError, match="expert"):
        parse_layout(layout)


def test_equal_on_more_ranks(ranks: Any) -> None:
    """The hybrids; float32 is compared on two ranks."""
    layouts = in_float64(LAYOUTS[4])
    assert_equal(layouts, parities(ranks, 4, "experts", "sgd", layouts))


def test_equal_on_more_ranks_with_adamw(ranks: Any) -> None:
    """Its state is split as the experts and the shards are."""
    layouts = in_float64(["ddp:expert=2", "fsdp:expert=2", "fsdp:expert=4", "fsdp:expert=2,tensor=2"])
    assert_equal(layouts, parities(ranks, 4, "experts", "adamw", layouts))
