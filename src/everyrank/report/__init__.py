"""Records made readable: a terminal table, Markdown, a self-contained HTML page. Imports no torch.

rows.py       which Records stand together, and what they are called
notes.py      the answer in a sentence; what a reader must know
table.py      what the columns are and what stands in them: plain text, no formatting
beside.py     several sets of Records: the same things measured twice
charts.py     drawings for the page
drawing.py    what they are drawn with
terminal.py   rich
page.py       HTML that needs no network
chaos.py      what came of faults, on a terminal
audit.py      what an audit found, on a terminal and as a page
comm.py       what collectives cost, on a terminal and as JSON
comm_page.py  the same as a page, with time over bytes
"""

from everyrank.report.audit import audit_page, print_audit
from everyrank.report.beside import Sets, beside_notes, beside_table
from everyrank.report.notes import answer, notes
from everyrank.report.rows import groups, title
from everyrank.report.table import Table, markdown, tables
from everyrank.report.terminal import print_findings, print_table

__all__ = [
    "Sets",
    "Table",
    "answer",
    "audit_page",
    "beside_notes",
    "beside_table",
    "groups",
    "markdown",
    "notes",
    "print_audit",
    "print_findings",
    "print_table",
    "tables",
    "title",
]
