"""Records made readable: a terminal table, Markdown, a self-contained HTML page. Imports no torch.

rows.py       groups of Records, and their titles
notes.py      the answer in a sentence, and notes on the measurement
table.py      tables as plain text, without formatting
beside.py     compares sets of Records, for example of two commits
curves.py     reads loss curves: Records, CSV, TensorBoard
two_curves.py  whether two loss curves differ by rounding, by noise of seeds, or by more
charts.py     charts for the page
drawing.py    functions that the charts share
terminal.py   prints a table with rich
page.py       a self-contained HTML page
chaos.py      results of `everyrank chaos`, on the terminal
plan.py       results of `everyrank plan`: memory, time, and errors of predictions
plan_page.py  results of `everyrank plan` as a page: memory by category, time by part
audit.py      results of `everyrank audit`, on the terminal and as a page
review.py     results of `everyrank audit` as annotations of GitHub, and as SARIF
port.py       results of `everyrank port`: its checks as lines, and a page with the script and the port side by side
comm.py       results of `everyrank comm`, on the terminal and as JSON
comm_page.py  results of `everyrank comm` as a page, with time over bytes
"""

from everyrank.report.audit import audit_page, print_audit
from everyrank.report.beside import Sets, beside_notes, beside_table
from everyrank.report.notes import answer, notes
from everyrank.report.review import github_annotations, sarif_log
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
