"""A table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from everyrank.report.table import Table

__all__ = ["print_table"]

_STYLES = {"equal": "green", "DIFFERENT": "bold red"}


def print_table(heading: str, table: Table, notes: Sequence[str] = ()) -> None:
    """Print it on standard output; where that is no terminal, as wide as the content needs and without colours."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    shown = RichTable(title=Text(_printable(heading)), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, name in enumerate(table.header):
        shown.add_column(Text(name), justify="left" if index in (0, 2) else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(
            *[Text(_printable(cell), style=_STYLES.get(cell, "dim" if "not verified" in cell else "")) for cell in row]
        )
    console.print(shown)
    for note in notes:
        console.print(Text(_printable(note), style="dim"))


def _printable(text: str) -> str:
    """Without control characters: a file from elsewhere must not steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
