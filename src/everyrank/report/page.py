"""A self-contained HTML page: tables, charts, provenance, and the command that repeats the measurement.

It loads nothing, runs no script, and escapes the text of the Records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everyrank.errors import CannotRunError
from everyrank.record import Record
from everyrank.report import charts
from everyrank.report.beside import Sets, beside_notes, beside_table
from everyrank.report.notes import answer, notes
from everyrank.report.rows import groups, title
from everyrank.report.table import tables

__all__ = ["environment", "page", "rendered", "require_libraries"]


def require_libraries() -> None:
    """Raise `CannotRunError` with the pip command if jinja2 or matplotlib is missing."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise CannotRunError(f"--html needs {error.name}: pip install 'everyrank[html]'") from None
    del jinja2, matplotlib


def environment() -> Any:
    """Return the jinja2 environment: it escapes everything and raises for undefined names."""
    require_libraries()
    import jinja2

    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)


def page(sets: Sets) -> str:
    """Return the page for one set of Records, or for several that are compared.

    Raises `CannotRunError` if jinja2 or matplotlib is missing.
    """
    sections = [_section(rows) for records in sets.values() for rows in groups(records)]
    table = beside_table(sets) if len(sets) > 1 else None
    beside: dict[str, Any] | None = None
    if table is not None:
        beside = {"table": table, "notes": beside_notes(sets), "chart": charts.beside(sets)}
    return rendered(sections, beside, list(sets))


def rendered(
    sections: Sequence[dict[str, Any]], beside: dict[str, Any] | None = None, names: Sequence[str] = ()
) -> str:
    """Return the page with these sections (see `_section`). Raises `CannotRunError` if jinja2 is missing."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment().from_string(template).render(sections=sections, beside=beside, names=names)


def _section(records: Sequence[Record]) -> dict[str, Any]:
    """Return the values of the template for the Records of one call."""
    provenance = records[0].provenance
    drawings = [(name, heading, draw(records)) for name, heading, draw in charts.CHARTS]
    return {
        "title": title(records[0]),
        "answer": answer(records),
        "tables": tables(records),
        "notes": notes(records),
        "command": provenance.get("command"),
        "charts": [drawing for drawing in drawings if drawing[2]],
        "checks": [(record.layout, record.parity.checks) for record in records if record.parity.checks],
        "provenance": {key: value for key, value in provenance.items() if value not in (None, {})},
    }
