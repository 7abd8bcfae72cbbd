"""The results of `everyrank comm` as a self-contained HTML page: charts of time over bytes, and the table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from everyrank.collectives.options import size_text
from everyrank.report.comm import by_line, candidate_name, comm_cost_table, comm_notes, comm_table, comm_title
from everyrank.report.drawing import COLOURS, draw, legend_above, legend_height
from everyrank.report.page import rendered

__all__ = ["comm_page"]

_MAX_TICKS = 8


def comm_page(measured: Mapping[str, Any]) -> str:
    """Return the page for the result of `comm_json`.

    Raises `CannotRunError` if jinja2 or matplotlib is missing.
    """
    rows: list[Mapping[str, Any]] = measured["rows"]
    notes = comm_notes(measured) if rows else []
    costs = [("", comm_cost_table(measured))] if measured["costs"] else []
    section = {
        "title": comm_title(measured) if rows else "no operation",
        "answer": notes[-1] if notes else "nothing was measured",
        "tables": [*costs, ("Every size", comm_table(measured, repeats=True))],
        "notes": notes[:-1],
        "command": shlex.join(measured["command"]),
        "charts": _charts(rows),
        "checks": [],
        "provenance": {key: value for key, value in measured["machine"].items() if value not in (None, {})},
    }
    return rendered([section])


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return (name, heading, SVG) of each operation, with a line for each backend and algorithm."""
    candidates = list(dict.fromkeys(map(candidate_name, rows)))
    colours = {candidate: COLOURS[index % len(COLOURS)] for index, candidate in enumerate(candidates)}
    charts: dict[str, list[list[Mapping[str, Any]]]] = {}
    for line in by_line(rows):
        measured_rows = [row for row in line if row["p50_seconds"] is not None and row["num_bytes"]]
        if len(measured_rows) > 1:
            charts.setdefault(measured_rows[0]["operation"], []).append(measured_rows)
    return [(name, name, _time_over_bytes(lines, colours)) for name, lines in charts.items()]


def _time_over_bytes(lines: Sequence[Sequence[Mapping[str, Any]]], colours: Mapping[str, str]) -> str:
    """Draw medians, with bars up to the 99th percentile, on logarithmic axes."""
    names = [candidate_name(line[0]) for line in lines]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for name, line in zip(names, lines, strict=True):
            sizes_of_line = [row["num_bytes"] for row in line]
            medians, percentiles_99 = ([row[key] * 1e6 for row in line] for key in ("p50_seconds", "p99_seconds"))
            axes.plot(sizes_of_line, medians, ".-", color=colours[name], label=name)
            axes.vlines(sizes_of_line, medians, percentiles_99, color=colours[name], linewidth=0.5)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row["num_bytes"] for line in lines for row in line})
        ticks = sizes[:: -(-len(sizes) // _MAX_TICKS)]
        axes.set_xticks(ticks, [size_text(size) for size in ticks], rotation=30)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")  # the default prints powers of ten as markup
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("us, median and 99th percentile")
        legend_above(axes, names)

    return draw(3.0 + legend_height(names), paint)
