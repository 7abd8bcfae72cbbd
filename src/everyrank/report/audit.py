"""The findings of an audit, on the terminal and as a page that shows them next to the user's code. Imports no torch."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from everyrank.audit import LEVELS, Audit, Finding, short_location
from everyrank.errors import printable
from everyrank.report.page import environment

__all__ = ["audit_page", "print_audit", "summary"]

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "PERF": "cyan", "NOTE": "dim"}
_CODE_WIDTH = 80  # width of the code in "look at" lines
_CONTEXT_LINES = 4  # lines of the script shown before and after a finding


def summary(audit: Audit) -> str:
    """Return the result in one line."""
    counts = {level: sum(finding.level == level for finding in audit.findings) for level in LEVELS}
    counts_text = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    ranks = f"{audit.world_size} rank{'s' if audit.world_size > 1 else ''}"
    scope = f"{audit.updates} updates on {ranks} in {audit.seconds:.0f} s"
    if audit.doubt and not counts["FAIL"]:
        return f"{audit.doubt}: {counts_text or 'no finding'} so far; {scope}"
    if counts["FAIL"] or counts["WARN"]:
        return f"{counts_text}; {scope}"
    return f"nothing wrong found{f' ({counts_text})' if counts_text else ''}; {scope}"


def print_audit(audit: Audit) -> None:
    """Print the findings, the worst first: level, line and rule, then the observation and the fix."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(Text(printable(f"audit of {' '.join(audit.python_args)}"), style="bold"))
    for finding in audit.findings:
        head = Text.assemble(
            (finding.level, _STYLES[finding.level]),
            "  ",
            (printable(short_location(finding.location)), "bold"),
            f"  {finding.rule}",
        )
        console.print(head)
        console.print(Padding(Text(printable(finding.text)), (0, 0, 0, 6), expand=False))
        if finding.fix:
            console.print(Padding(Text(f"write: {printable(finding.fix)}", style="green"), (0, 0, 0, 6), expand=False))
        for number, line in enumerate(finding.shown_lines):
            shown = f"{'look at' if not number else '       '} {short_location(line)}  {_code_at(line)}".rstrip()
            console.print(Padding(Text(printable(shown), style="dim"), (0, 0, 0, 6), expand=False))
    for kind, lines in (("replay", audit.replayed), ("note", audit.altered), ("not checked", audit.unchecked)):
        for line in lines:
            console.print(Text(f"{kind}: {printable(line)}", style="dim"))
    console.print(Text(printable(summary(audit)), style="bold"))


def _code_at(location: str) -> str:
    """Return the text of a line, shortened; "" if the file cannot be read."""
    path, _, line = location.rpartition(":")
    try:
        return textwrap.shorten(linecache.getline(path, int(line)).strip(), _CODE_WIDTH, placeholder=" ...")
    except (ValueError, OSError):
        return ""


def audit_page(audit: Audit) -> str:
    """Return a self-contained HTML page: each file that has findings, with the findings next to its lines.

    Raises `CannotRunError` if jinja2 is missing.
    """
    template = Path(__file__).with_name("audit.html").read_text(encoding="utf-8")
    files: dict[str, list[Finding]] = {}
    for finding in audit.findings:
        files.setdefault(finding.location.rpartition(":")[0], []).append(finding)
    shown_files = [
        {"name": _relative(name) or "the run as a whole", "parts": _excerpts(name, findings)}
        for name, findings in files.items()
    ]
    command = " ".join(audit.python_args)
    page = environment().from_string(template)
    return page.render(audit=audit, files=shown_files, command=command, summary=summary(audit), relative=_relative)


def _relative(path: str) -> str:
    """Return the path relative to the current folder, if it is inside."""
    return path.removeprefix(f"{Path.cwd()}/")


def _excerpts(name: str, findings: list[Finding]) -> list[dict[str, Any]]:
    """Return the lines around each finding, in the order of the file, with the findings of that line."""
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace") if name else ""
    except OSError:  # the file has been removed
        text = ""
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines would also divide at a form feed
    by_line: dict[int, list[Finding]] = {}
    for finding in findings:
        by_line.setdefault(int(finding.location.rpartition(":")[2] or 0), []).append(finding)
    excerpts: list[dict[str, Any]] = []
    for number, line_findings in sorted(by_line.items()):
        first, last = max(1, number - _CONTEXT_LINES), min(len(lines), number + _CONTEXT_LINES)
        # without the indentation that they share, more of each line fits next to the findings
        code = textwrap.dedent("\n".join(lines[first - 1 : last])).split("\n")
        shown_lines = [
            {"number": line, "text": text, "is_named": line == number} for line, text in enumerate(code, first)
        ]
        excerpts.append({"lines": shown_lines, "findings": line_findings})
    return excerpts
