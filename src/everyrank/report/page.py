"""A self-contained HTML page: tables, loss curves lying on each other, where the numbers come from.

It loads nothing, runs no script, and escapes whatever the Records hold.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everyrank.errors import CannotRunError
from everyrank.record import Record
from everyrank.report.table import bench_table, groups, notes, title, verify_table

__all__ = ["page", "require_libraries"]

_TEXT = "#010203"  # stands for the page's own text colour, light or dark


def require_libraries() -> None:
    """Raise `CannotRunError`, with what to install, where the page cannot be made."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise CannotRunError(f"--html needs {error.name}: pip install 'everyrank[html]'") from None
    del jinja2, matplotlib


def page(records: Sequence[Record]) -> str:
    """The page as text. Raises `CannotRunError` where jinja2 or matplotlib is missing."""
    require_libraries()
    import jinja2

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections: list[dict[str, Any]] = []
    for rows in groups(records):
        is_timed = any(record.throughput_samples_per_second for record in rows)
        sections.append(
            {
                "title": title(rows[0]),
                "table": bench_table(rows) if is_timed else verify_table(rows),
                "notes": notes(rows),
                "curves": _curves(rows),
                "checks": [(record.layout, record.parity.checks) for record in rows if record.parity.checks],
                "provenance": {key: value for key, value in rows[0].provenance.items() if value not in (None, {})},
            }
        )
    return environment.from_string(template).render(sections=sections)


def _curves(records: Sequence[Record]) -> str:
    """Losses of all layouts on each other, and below how far each is from single: inline SVG, or nothing."""
    shown = [record for record in records if len(record.loss) > 1]
    if not shown:
        return ""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(
        {"svg.fonttype": "none", "text.color": _TEXT, "axes.edgecolor": _TEXT, "text.parse_math": False}
    )
    mpl.rcParams.update(
        {"axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT, "svg.hashsalt": "everyrank"}
    )
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    single = next((record for record in shown if record.layout == "single"), None)
    for index, record in enumerate(shown):
        # each line thinner than the one below it: equal curves stay visible as nested bands
        width = 1.2 + 1.6 * (len(shown) - 1 - index)
        upper.plot(record.loss, linewidth=width, color=f"C{index}", label=record.layout)
        if single is not None and record is not single:
            pairs = zip(single.loss, record.loss, strict=False)
            gaps = [abs(a - b) / abs(a) if a and a != b else float("nan") for a, b in pairs]  # no gap, no point
            lower.plot(gaps, marker=".", markersize=3, linewidth=width / 2, color=f"C{index}")
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    lower.set_ylabel("relative distance\nfrom single")
    lower.set_xlabel("update")
    for axes in (upper, lower):
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_TEXT, "currentColor")
