"""Mixtures of experts are equal to one device, whichever ranks hold the experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import zoo
from everyrank import EveryrankError, parse_layout
from everyrank.errors import LayoutError
from everyrank.strategies import prepare
from everyrank.world import World
from parity.test_equal import COMPILED, assert_equal, in_float64, parities

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
        "ddp:expert=2,accumulate=2",
        "fsdp:expert=2,recompute",
        "fsdp:replicate=2,expert=2",
        "ddp:expert=2,tensor=2",
        "ddp:expert=2,context=2",
        "fsdp:expert=2,context=2",
        "fsdp:expert=2,meta",
    ],
}


def test_equal(ranks: Any) -> None:
    """Top 2 of 4 experts on two ranks. Batches are uneven, with masks, micro-batches, recomputation and clipping."""
    assert_equal(LAYOUTS[2], parities(ranks, 2, "experts", "sgd", LAYOUTS[2]))


def test_equal_with_few_tokens(ranks: Any) -> None:
    """Top 1 of 8 experts. In many updates, some experts and ranks get no token."""
    layouts = ["expert", "fsdp:expert=2,accumulate=3"]
    assert_equal(layouts, parities(ranks, 2, "experts", "adamw", layouts, model=zoo.eight_experts_top_1))


def test_equal_if_one_expert_gets_all_tokens(ranks: Any) -> None:
    """The other rank takes part in backward. Its gradients are zero."""
    layouts = ["expert", "expert:recompute,accumulate=2", "fsdp:expert=2"]
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts, model=zoo.all_tokens_to_one_expert))


def test_equal_under_other_strategies_and_in_low_precision(ranks: Any) -> None:
    """Other strategies do not split the experts. Low precision is within the tolerance band."""
    layouts = ["zero1", "fsdp", "tensor", "context", "pipeline", "expert:precision=bf16"]
    layouts += ["fsdp:expert=2,precision=bf16", "expert:precision=fp16"]
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts))


@pytest.mark.timeout(450)
def test_equal_with_compile(ranks: Any) -> None:
    """The number of rows of an expert is known only at run time. One block is enough: all compile in the same way."""
    layouts, model = ["expert:compile,precision=float64"], functools.partial(zoo.expert_decoder, num_blocks=1)
    assert_equal(layouts, parities(ranks, 2, "experts", "sgd", layouts, **COMPILED, model=model))


def refusal(world: World, layout: str, changes: dict[str, Any]) -> str:
    """Return the exit status and message of a refusal, or "" if the layout is supported."""
    try:
        prepare(zoo.workload("experts", **changes), parse_layout(layout), world)
    except EveryrankError as error:
        return f"{error.exit_status} {error}"
    return ""


@pytest.mark.parametrize(
    ("layout", "changes", "expected_text"),
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
def test_unsupported_expert_layout_is_refused(
    ranks: Any, layout: str, changes: dict[str, Any], expected_text: str
) -> None:
    """Every rank refuses with one line and exit status 2."""
    for message in ranks(2, refusal, layout, changes):
        assert message.startswith("2 ")
        assert expected_text in message
        assert "\n" not in message


@pytest.mark.parametrize("layout", ["ddp:expert=2,compress=fp16", "ddp:expert=2,batch_norm=local", "zero1:expert=2"])
def test_parse_layout_refuses_options_that_conflict_with_expert(layout: str) -> None:
    """The layout is refused before any process starts."""
    with pytest.raises(LayoutError, match="expert"):
        parse_layout(layout)


def test_equal_on_four_ranks(ranks: Any) -> None:
    """The layouts include hybrids, in float64, because float32 is compared on two ranks. AdamW trains four more."""
    layouts = in_float64(LAYOUTS[4])
    assert_equal(layouts, parities(ranks, 4, "experts", "sgd", layouts))


def test_equal_on_four_ranks_with_adamw(ranks: Any) -> None:
    """The optimizer state is split like the experts and the shards."""
    layouts = in_float64(["ddp:expert=2", "fsdp:expert=2", "fsdp:expert=4", "fsdp:expert=2,tensor=2"])
    assert_equal(layouts, parities(ranks, 4, "experts", "adamw", layouts))
