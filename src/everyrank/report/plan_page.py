"""The results of `everyrank plan` as a self-contained page: memory by category, time by part, and the tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from everyrank.report.drawing import COLOURS, draw, legend_above, legend_height
from everyrank.report.page import rendered
from everyrank.report.plan import plan_notes, plan_tables, plan_title

__all__ = ["plan_page"]

_GIB = 2**30
_MAX_NAME_LENGTH = 28  # letters of a layout below a bar


def plan_page(answer: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Return the page as text. Raises `CannotRunError` if jinja2 or matplotlib is missing."""
    notes = [line for line in plan_notes(answer) if line]  # empty lines divide them on the terminal
    sized = [row for row in answer["layouts"] if row.get("categories")]
    shortlist = answer.get("shortlist", [])
    names = [row["layout"] for row in [*sized, *shortlist]]
    memory = [{name: size / _GIB for name, size in row["categories"].items()} for row in [*sized, *shortlist]]
    room = answer["cluster"]["memory_bytes"] / _GIB
    charts = [("memory", "Allocated memory of the fullest rank", _stacked(names, memory, "GiB", room))] if names else []
    if shortlist:
        phases = [choice["parts"] for choice in shortlist]
        charts.append(
            ("time", "Time of a step", _stacked([choice["layout"] for choice in shortlist], phases, "seconds"))
        )
    section = {
        "title": plan_title(answer),
        "answer": notes[0] if notes else "",
        "tables": plan_tables(answer),
        "notes": notes[1:],
        "command": shlex.join(["everyrank", *argv]),
        "charts": charts,
        "checks": [],
        "provenance": {key: value for key, value in answer["cluster"].items() if value not in (None, "")},
    }
    return rendered([section])


def _stacked(names: Sequence[str], rows: Sequence[Mapping[str, float]], unit: str, line: float | None = None) -> str:
    """Draw a horizontal bar for each row, stacked by part; with `line`, a vertical line at the memory of a GPU."""
    phases = list(dict.fromkeys(phase for row in rows for phase, size in row.items() if size))
    height = 0.5 * len(names) + 0.7 + legend_height(phases)

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        left = [0.0] * len(rows)
        for index, phase in enumerate(phases):
            sizes = [row.get(phase, 0.0) for row in rows]
            axes.barh(range(len(rows)), sizes, left=left, color=COLOURS[index % len(COLOURS)], label=phase)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        if line is not None:
            axes.axvline(line, linestyle="--", color="#7a7a7a")
        short = [name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…" for name in names]
        axes.set_yticks(range(len(rows)), short)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        legend_above(axes, phases)

    return draw(height, paint)
