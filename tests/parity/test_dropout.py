"""Dropout drops under every layout what it drops on one device."""

from __future__ import annotations

from typing import Any

import zoo
from everyrank import parse_layout
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.world import World
from parity.test_equal import assert_equal

_COUNTER = iter(range(10**9))


def check_quickly(world: World, key: str, name: str, layouts: list[str], changes: dict[str, Any]) -> Any:
    """Parity of each layout in float64, over a few updates."""
    workload = zoo.workload(name, "sgd", **changes)
    subject = parity_case(workload, *open_data(workload, world), steps=4, is_quick=True)
    assert any("dropout on" in note for note in subject.notes)
    return [check_layout(subject, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def assert_quickly_equal(ranks: Any, count: int, name: str, layouts: list[str], **changes: Any) -> None:
    assert_equal(layouts, ranks(count, check_quickly, f"dropout/{next(_COUNTER)}", name, layouts, changes)[0])


def test_decoder(ranks: Any) -> None:
    """Of the embedding, the residual stream, split features, attention weights; by modules and by functions."""
    layouts = [
        "ddp:accumulate=3,recompute",
        "tensor:sequence=true,recompute",
        "context",
        "context:method=ulysses,recompute",
        "pipeline:schedule=interleaved,recompute",
    ]
    assert_quickly_equal(ranks, 2, "decoder", layouts, model=zoo.dropping_everywhere)
