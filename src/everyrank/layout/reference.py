"""Which layout may stand in for one device, where that cannot hold the model (`verify --reference`)."""

from __future__ import annotations

import dataclasses

from everyrank.errors import LayoutError
from everyrank.layout.layout import Layout
from everyrank.layout.options import BuildOptions

__all__ = ["check_reference"]


def check_reference(layout: Layout, reference: Layout, world_size: int) -> None:
    """Raise `LayoutError` where `reference` cannot stand in for one device, or is the layout itself.

    What only changes how numbers are kept, not what is computed (precision, meta), makes no other layout of it.
    """
    if reference.row.any_axes:
        raise LayoutError(f"--reference {reference}: own parallel code is what is checked; give a layout of everyrank")
    if not reference.is_exact or reference.servers or reference.simulated:
        raise LayoutError(
            f"--reference {reference}: it does not stand for one device: it changes the mathematics, or has servers; "
            "give fsdp, tensor or pipeline"
        )
    if _computes(layout, world_size) == _computes(reference, world_size):
        raise LayoutError(
            f"layout {layout}: compared with --reference {reference} it is compared with itself, which shows nothing; "
            "give another reference"
        )


def _computes(layout: Layout, world_size: int) -> tuple[object, ...]:
    """What a layout computes where."""
    options = tuple(layout.read(kind) for kind in layout.row.options if kind is not BuildOptions)
    common = dataclasses.replace(layout, degrees={}, options={}, precision="float32")
    return common, tuple(layout.mesh(world_size).items()), options
