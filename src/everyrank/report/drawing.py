"""Functions that the charts share: figures as SVG, bars, legends, error bars, a colour for each layout."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from everyrank.record import Interval, Record
from everyrank.report.rows import is_checked, label

__all__ = [
    "COLOURS",
    "TEXT_COLOUR",
    "bars",
    "colours_of",
    "draw",
    "error_bars",
    "legend_above",
    "legend_height",
    "short",
]

TEXT_COLOUR = "#010203"  # placeholder for the text colour of the page
_WIDTH = 5.0  # inches
_MAX_NAME_LENGTH = 30

# The colours are distinct for most colour-blind people, on light and dark pages. The first eight are those of Okabe
# and Ito (2008), the others Tol's muted colours. A few are replaced.
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#a6811c", "#7a7a7a"),
    *("#882255", "#44aa99", "#6655bb", "#999933"),
)


def draw(height: float, paint: Callable[[Any], None]) -> str:
    """Return a figure that `paint` draws, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor"),
        TEXT_COLOUR,
    )
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "everyrank", "text.parse_math": False, "font.size": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                _label_plainly(axis)
            axes.patch.set_alpha(0)
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(TEXT_COLOUR, "currentColor")


def _label_plainly(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers: with `text.parse_math=False`, `$10^3$` is shown literally."""
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
        axis.set_major_formatter(LogFormatter())
    if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def colours_of(records: Sequence[Record]) -> dict[str, str]:
    """Return a colour for each layout of a section. Layouts that appear in charts get the first colours."""
    shown = [record for record in records if is_checked(record) or record.loss]
    names = dict.fromkeys(record.layout for record in (*shown, *records))
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def error_bars(*values: Interval) -> list[list[float]]:
    """Return the distances of the interval ends from the medians, as matplotlib wants them for error bars."""
    return [
        [max(0.0, value.median - value.low) for value in values],
        [max(0.0, value.high - value.median) for value in values],
    ]


def short(text: str) -> str:
    """Shorten a name for a chart; tables show it in full."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_NAME_LENGTH else text[: _MAX_NAME_LENGTH - 1] + "…"


def _columns(names: Sequence[str]) -> int:
    """Return the number of columns that fit in a legend of these names."""
    return max(1, min(3, 54 // (max(map(len, names), default=1) + 6)))


def legend_above(axes: Any, names: Sequence[str]) -> None:
    """Draw a legend above the chart, with each name once."""
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    axes.legend(
        by_label.values(),
        by_label.keys(),
        frameon=False,
        ncols=_columns(names),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        fontsize=9,
    )


def legend_height(names: Sequence[str]) -> float:
    """Return the height of the legend, in inches."""
    return 0.2 * -(-len(names) // _columns(names))


def bars(
    records: Sequence[Record],
    x_label: str,
    paint_row: Callable[[Any, int, Record], None],
    legend: Sequence[str] = (),
) -> str:
    """Return an SVG with a horizontal bar for each Record, from top to bottom, or "" if there are no Records."""

    def all_bars(figure: Any) -> None:
        axes = figure.subplots()
        for row, record in enumerate(records):
            paint_row(axes, row, record)
        axes.set_yticks(range(len(records)), [short(label(record)) for record in records])
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        if legend:
            legend_above(axes, legend)

    return draw(0.9 + 0.42 * len(records) + legend_height(legend), all_bars) if records else ""
