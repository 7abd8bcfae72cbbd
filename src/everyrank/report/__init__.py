"""Records made readable: a terminal table, Markdown, a self-contained HTML page. Imports no torch.

table.py      what the columns are and what stands in them: plain text, no formatting
terminal.py   rich
markdown.py   for a pull request or a README
page.py       HTML that needs no network
"""

from everyrank.report.markdown import markdown
from everyrank.report.table import Table, bench_table, groups, notes, verify_table
from everyrank.report.terminal import print_findings, print_table

__all__ = ["Table", "bench_table", "groups", "markdown", "notes", "print_findings", "print_table", "verify_table"]
