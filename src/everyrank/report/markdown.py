"""A table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.report.table import Table

__all__ = ["markdown"]


def markdown(heading: str, table: Table, notes: Sequence[str] = ()) -> str:
    """Heading, table, its footnotes and notes; what Markdown or HTML would take for markup is escaped."""
    lines = [f"### {_escape(heading)}", ""]
    lines += [_row(table.header), _row(["---"] * len(table.header), escape=False), *map(_row, table.rows), ""]
    lines += [line for note in (*table.footnotes, *notes) for line in (_escape(note), "")]
    return "\n".join(lines)


def _row(cells: Sequence[str], escape: bool = True) -> str:
    return "| " + " | ".join(_escape(cell) if escape else cell for cell in cells) + " |"


def _escape(text: str) -> str:
    for letter in "\\`*_[]|#":
        text = text.replace(letter, "\\" + letter)
    text = " ".join(text.split())  # a line break would end the row
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
