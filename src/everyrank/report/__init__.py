"""Records made readable: a terminal table, Markdown, a self-contained HTML page. Imports no torch.

<<<<<<< HEAD
rows.py       groups of Records, and their titles
notes.py      the answer in a sentence, and notes on the measurement
table.py      tables as plain text, without formatting
beside.py     compares sets of Records, for example of two commits
charts.py     charts for the page
drawing.py    functions that the charts share
terminal.py   prints a table with rich
page.py       a self-contained HTML page
chaos.py      results of `everyrank chaos`, on the terminal
audit.py      results of `everyrank audit`, on the terminal and as a page
comm.py       results of `everyrank comm`, on the terminal and as JSON
comm_page.py  results of `everyrank comm` as a page, with time over bytes
=======
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
annotations.py  the same beside the code, on GitHub and in editors
comm.py       what collectives cost, on a terminal and as JSON
comm_page.py  the same as a page, with time over bytes
>>>>>>> fb8e5ca (audit: --format github, --sarif, an action, a pre-commit hook and a page about CI; ranks that read each other's samples)
"""

from everyrank.report.annotations import github_annotations, sarif_log
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
    "github_annotations",
    "groups",
    "markdown",
    "notes",
    "print_audit",
    "print_findings",
    "print_table",
    "sarif_log",
    "tables",
    "title",
]
