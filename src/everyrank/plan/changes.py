"""Changes of a layout that take less memory, smallest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from everyrank.errors import LayoutError
from everyrank.layout import Layout
from everyrank.layout.options import BuildOptions

__all__ = ["smaller_layouts"]


def smaller_layouts(
    layout: Layout, has_blocks: bool, alone: Sequence[int], combined: Sequence[int], meta: bool = False
) -> Iterator[tuple[str, Layout]]:
    """Yield (change, layout) in this order: meta=true, bf16, recompute, smaller micro-batches, and these together.

    has_blocks  whether the model has blocks, which recompute needs
    alone       factors of smaller micro-batches, tried as the only change; combined: the same, with bf16 and recompute
                (1: micro-batches of the same size)
    meta        try meta=true, which all later changes then have, too

    A change that the layout does not support is left out.
    """
    is_whole = meta and layout.strategy in ("fsdp", "pipeline", "tensor") and not layout.read(BuildOptions).meta
    changes: dict[str, dict[str, Any]] = {}
    if layout.precision == "float32":
        changes["bf16"] = {"precision": "bf16"}
    if has_blocks and not layout.recompute:
        changes["recompute"] = {"recompute": True}
    steps = [[name] for name in changes] + [[_smaller(factor)] for factor in alone]
    steps += [[*changes, *([_smaller(factor)] if factor > 1 else [])] for factor in combined]
    changes |= {_smaller(factor): {"accumulate": layout.accumulate * factor} for factor in (*alone, *combined)}
    if is_whole:
        changes["meta=true"] = {"options": {**layout.options, "meta": True}}
        steps = [["meta=true"], *(["meta=true", *names] for names in steps)]
    tried: set[str] = set()
    for names in steps:
        fields = {field: value for name in names for field, value in changes[name].items()}
        if (change := ", ".join(names)) in tried or not names:
            continue
        tried.add(change)
        try:
            changed = dataclasses.replace(layout, **fields)
        except LayoutError:
            continue
        yield change, changed


def _smaller(factor: int) -> str:
    return f"micro-batches 1/{factor} as large"
