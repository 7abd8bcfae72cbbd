"""What the drawings have in common: an SVG out of a figure, bars, legends, error bars, a colour for each layout."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from everyrank.record import Interval, Record
from everyrank.report.rows import is_checked, label

__all__ = ["COLOURS", "TEXT", "bars", "colours_of", "draw", "legend_above", "legend_height", "short", "spread"]

TEXT = "#010203"  # stands for the page's own text colour
_WIDTH = 5.0  # inches
_LONGEST_NAME = 30

# Okabe and Ito 2008, then Tol's muted ones: told apart by most colour-blind people, and on light and dark
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#a6811c", "#7a7a7a"),
    *("#882255", "#44aa99", "#6655bb", "#999933"),
)


def draw(height: float, paint: Callable[[Any], None]) -> str:
    """A figure painted by `paint`, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor"), TEXT
    )
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "everyrank", "text.parse_math": False, "font.size": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(TEXT, "currentColor")


def colours_of(records: Sequence[Record]) -> dict[str, str]:
    """The colour of each layout of the page's section; those that a drawing can show have the first colours."""
    shown = [record for record in records if is_checked(record) or record.loss]
    names = dict.fromkeys(record.layout for record in (*shown, *records))
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def spread(*values: Interval) -> list[list[float]]:
    """How far the intervals reach down and up from their medians, as error bars are drawn."""
    return [
        [max(0.0, value.median - value.low) for value in values],
        [max(0.0, value.high - value.median) for value in values],
    ]


def short(text: str) -> str:
    """A name that leaves room for the drawing; the tables have it in full."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"


def _columns(names: Sequence[str]) -> int:
    """How many columns a legend of these names has room for."""
    return max(1, min(3, 54 // (max(map(len, names), default=1) + 6)))


def legend_above(axes: Any, names: Sequence[str]) -> None:
    """What is drawn several times under one name is named once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(
        once.values(),
        once.keys(),
        frameon=False,
        ncols=_columns(names),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        fontsize=9,
    )


def legend_height(names: Sequence[str]) -> float:
    """The height of a legend of so many lines, in inches."""
    return 0.2 * -(-len(names) // _columns(names))


def bars(
    records: Sequence[Record],
    heading: str,
    paint: Callable[[Any, int, Record], None],
    legend: Sequence[str] = (),
) -> str:
    """A horizontal bar for each Record, from top to bottom."""

    def all_bars(figure: Any) -> None:
        axes = figure.subplots()
        for row, record in enumerate(records):
            paint(axes, row, record)
        axes.set_yticks(range(len(records)), [short(label(record)) for record in records])
        axes.invert_yaxis()
        axes.set_xlabel(heading)
        if legend:
            legend_above(axes, legend)

    return draw(0.9 + 0.42 * len(records) + legend_height(legend), all_bars) if records else ""
