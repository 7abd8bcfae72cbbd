"""Records made readable: a terminal table, Markdown, a self-contained HTML page. Imports no torch.

table.py      what the columns are and what stands in them: plain text, no formatting
beside.py     several sets of Records: the same things measured twice
charts.py     drawings for the page
drawing.py    what they are drawn with
terminal.py   rich
markdown.py   for a pull request or a README
page.py       HTML that needs no network
"""

from everyrank.report.beside import Sets, beside_notes, beside_table
from everyrank.report.markdown import markdown
from everyrank.report.table import Table, groups, notes, tables, title
from everyrank.report.terminal import print_findings, print_table

__all__ = [
    "Sets",
    "Table",
    "beside_notes",
    "beside_table",
    "groups",
    "markdown",
    "notes",
    "print_findings",
    "print_table",
    "tables",
    "title",
]
