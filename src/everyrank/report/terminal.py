"""Prints tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from everyrank.doctor.results import CheckResult
from everyrank.errors import printable
from everyrank.report.table import Table

__all__ = ["print_findings", "print_table"]

_STYLES = {"equal": "green", "DIFFERENT": "bold red"}


def print_table(heading: str, table: Table, notes: Sequence[str] = ()) -> None:
    """Print a table on standard output; if that is not a terminal, wide and without colours."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    rich_table = RichTable(title=Text(printable(heading)), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, name in enumerate(table.header):
        rich_table.add_column(
            Text(printable(name)), justify="left" if index == 0 or name == "parity" else "right", overflow="fold"
        )
    for row in table.rows:
        rich_table.add_row(*[Text(printable(cell), style=_STYLES.get(cell.partition(" ")[0], "")) for cell in row])
    console.print(rich_table if table.rows else Text(printable(heading), style="bold"))
    for note in (*table.footnotes, *notes):
        console.print(Text(printable(note), style="dim"))


_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red"), "absent": ("·", "dim")}


def print_findings(sections: Mapping[str, Sequence[CheckResult]]) -> None:
    """Print the results of `doctor`: a sign, the subject, the result and the fix."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=400)
    for name, findings in sections.items():
        rich_table = RichTable(title=Text(name), title_justify="left", title_style="bold", box=None, show_header=False)
        for finding in findings:
            sign, style = _SIGNS[finding.status]
            text = Text(printable(finding.text), style="dim" if finding.status == "absent" else "")
            if finding.fix:
                text.append(f"; {printable(finding.fix)}", style=style)
            rich_table.add_row(Text(sign, style=style), Text(printable(finding.what)), text)
        console.print(rich_table)
        console.print()
