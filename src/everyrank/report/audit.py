"""What an audit found: for a terminal, and as a page with the person's lines beside it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from everyrank.audit import LEVELS, Audit, Finding, short_place
from everyrank.errors import printable
from everyrank.report.page import environment

__all__ = ["audit_page", "print_audit", "summary"]

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "PERF": "cyan", "NOTE": "dim"}
_AROUND = 4  # lines of the script before and after one that is named


def summary(audit: Audit) -> str:
    """The answer in a line."""
    counts = {level: sum(finding.level == level for finding in audit.findings) for level in LEVELS}
    counts_text = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    ranks = f"{audit.world_size} rank{'s' if audit.world_size > 1 else ''}"
    seen = f"{audit.updates} updates on {ranks} in {audit.seconds:.0f} s"
    if audit.doubt and not counts["FAIL"]:
        return f"{audit.doubt}: {counts_text or 'no finding'} so far; {seen}"
    if counts["FAIL"] or counts["WARN"]:
        return f"{counts_text}; {seen}"
    return f"nothing wrong found{f' ({counts_text})' if counts_text else ''}; {seen}"


def print_audit(audit: Audit) -> None:
    """Findings, worst first: level, line, rule; below it what was seen, and what to write instead."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(Text(printable(f"audit of {' '.join(audit.words)}"), style="bold"))
    for finding in audit.findings:
        head = Text.assemble(
            (finding.level, _STYLES[finding.level]),
            "  ",
            (printable(short_place(finding.place)), "bold"),
            f"  {finding.rule}",
        )
        console.print(head)
        console.print(Padding(Text(printable(finding.text)), (0, 0, 0, 6), expand=False))
        if finding.fix:
            console.print(Padding(Text(f"write: {printable(finding.fix)}", style="green"), (0, 0, 0, 6), expand=False))
        if finding.also:
            also = ", ".join(short_place(location) for location in finding.also)
            console.print(Padding(Text(f"see also {printable(also)}", style="dim"), (0, 0, 0, 6), expand=False))
    for kind, lines in (("replay", audit.replayed), ("altered", audit.altered), ("not checked", audit.unchecked)):
        for line in lines:
            console.print(Text(f"{kind}: {printable(line)}", style="dim"))
    console.print(Text(printable(summary(audit)), style="bold"))


def audit_page(audit: Audit) -> str:
    """A page that loads nothing: the files with findings, and these beside their lines.

    Raises `CannotRunError` where jinja2 is missing.
    """
    template = Path(__file__).with_name("audit.html").read_text(encoding="utf-8")
    files: dict[str, list[Finding]] = {}
    for finding in audit.findings:
        files.setdefault(finding.place.rpartition(":")[0], []).append(finding)
    shown = [
        {"name": name or "the run as a whole", "parts": _parts(name, findings)} for name, findings in files.items()
    ]
    words = " ".join(audit.words)
    return environment().from_string(template).render(audit=audit, files=shown, words=words, summary=summary(audit))


def _parts(name: str, findings: list[Finding]) -> list[dict[str, Any]]:
    """The lines around each line that is named, in the order of the file, with what is said of it."""
    try:
        lines = Path(name).read_text(encoding="utf-8", errors="replace").splitlines() if name else []
    except OSError:  # it is not there any more
        lines = []
    by_line: dict[int, list[Finding]] = {}
    for finding in findings:
        by_line.setdefault(int(finding.place.rpartition(":")[2] or 0), []).append(finding)
    parts: list[dict[str, Any]] = []
    for number, at_line in sorted(by_line.items()):
        first, last = max(1, number - _AROUND), min(len(lines), number + _AROUND)
        around = [{"number": at, "text": lines[at - 1], "is_named": at == number} for at in range(first, last + 1)]
        parts.append({"lines": around, "findings": at_line})
    return parts
