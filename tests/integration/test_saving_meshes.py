"""`--save-async` on the way that it takes on CUDA, under every mesh that there is; and what would break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everyrank.layout import STRATEGIES, parse_layout
from round_trips import MISTAKES, NOT_HERE, meshes, round_trip

# what four ranks cannot have: three axes, and an axis of four beside one of two
EIGHT = [*sorted(set(meshes(8)) - set(meshes(4))), "fsdp:tensor=2", "pipeline:shard=2", "ddp:expert=2"]


@pytest.mark.parametrize(
    ("size", "layout"), [*((4, layout) for layout in meshes(4)), *((8, layout) for layout in EIGHT)]
)
def test_round_trip(ranks: Any, tmp_path: Path, size: int, layout: str) -> None:
    """Saved twice while the training goes on: to the last bit what was written at once, on one process and on all."""
    round_trip(ranks, size, layout, tmp_path)


def test_every_axis_is_there() -> None:
    """A new strategy is in the table, or says why it is not here; so is each axis that goes with it."""
    found = [parse_layout(layout) for layout in meshes(8)]
    assert {layout.strategy for layout in found} | NOT_HERE.keys() == {
        name for name, row in STRATEGIES.items() if row.axis is not None
    }
    for name, row in STRATEGIES.items():
        axes = {axis for layout in found if layout.strategy == name for axis in layout.degrees}
        assert axes == set(row.also_axes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(ranks: Any, tmp_path: Path, mistake: str) -> None:
    """Each mistake in how the device's memory is copied turns a round trip red."""
    with pytest.raises(AssertionError, match="model/"):  # which tensor is another one, or not there in full
        round_trip(ranks, 4, "fsdp:tensor=2", tmp_path, mistake)
