"""`--save-async` with the code path of CUDA, under each mesh, and mistakes that would break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everyrank.layout import STRATEGIES, parse_layout
from round_trips import MISTAKES, NOT_TESTED, meshes, round_trip

# Four ranks cannot have three axes, or an axis of four next to one of two. They cover each pair of axes.
EIGHT = ["fsdp:replicate=2,context=2,tensor=2", "pipeline:replicate=2,shard=2,tensor=2", "fsdp:tensor=2"]


@pytest.mark.parametrize(
    ("size", "layout"), [*((4, layout) for layout in meshes(4)), *((8, layout) for layout in EIGHT)]
)
def test_asynchronous_checkpoint_is_bitwise_equal_under_each_mesh(
    ranks: Any, tmp_path: Path, size: int, layout: str
) -> None:
    """Two checkpoints that are saved during training equal synchronous ones. Layouts in `RESUMED` are also resumed."""
    round_trip(ranks, size, layout, tmp_path)


def test_meshes_cover_all_strategies_and_axes() -> None:
    """A new strategy is in `meshes` or in `NOT_TESTED`, with each axis that it supports."""
    found = [parse_layout(layout) for layout in meshes(8)]
    assert {layout.strategy for layout in found} | NOT_TESTED.keys() == {
        name for name, row in STRATEGIES.items() if row.axis is not None
    }
    for name, row in STRATEGIES.items():
        axes = {axis for layout in found if layout.strategy == name for axis in layout.degrees}
        assert axes == set(row.also_axes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_copying_device_memory_are_detected(ranks: Any, tmp_path: Path, mistake: str) -> None:
    """With each mistake, a round trip fails and names the tensor."""
    with pytest.raises(AssertionError, match="model/"):  # which tensor is another one, or not there in full
        round_trip(ranks, 4, "fsdp:tensor=2", tmp_path, mistake)
