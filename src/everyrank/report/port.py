"""The result of `everyrank port` as lines of text, and as a page with the script and the port side by side."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everyrank.audit import Finding, short_location
from everyrank.port import Attempt, PortResult
from everyrank.report.page import environment

__all__ = ["check_lines", "edit_reasons", "port_page"]

_CONTEXT_LINES = 3


def edit_reasons(attempt: Attempt) -> list[tuple[int, str]]:
    """Return (line of the script, reason) of each edit, in the order of the lines."""
    pairs = [(edit.start[0], edit.reason) for edit in attempt.edits if edit.reason]
    return sorted(dict.fromkeys(pairs))


def check_lines(result: PortResult) -> list[str]:
    """Return a line for each number of ranks."""
    lines: list[str] = []
    precision = "float64" if result.float64 else "float32, because the script does not run in float64"
    for comparison in result.best.comparisons:
        if not comparison.is_equal:
            lines.append(comparison.difference)
            continue
        gaps = ", ".join(f"{kind} {gap:.0e}" for kind, gap in comparison.largest.items())
        dropout = ", all dropout left out" if result.best.without_dropout else ""
        lines.append(
            f"{comparison.updates} updates on {comparison.ranks} ranks equal one process in {precision}{dropout}: "
            f"largest relative difference of {gaps}"
        )
    return lines


def port_page(result: PortResult, findings: Sequence[Finding], python_args: Sequence[str], port_name: str) -> str:
    """Return a self-contained HTML page: the lines that change next to those of the script, with their reasons.

    Raises `CannotRunError` if jinja2 is missing.
    """
    template = Path(__file__).with_name("port.html").read_text(encoding="utf-8")
    best = result.best
    script_lines = _lines(result.files.whole)
    num_lines = result.files.num_lines  # with a second file: of the first, and of the line between the two
    border = script_lines[num_lines - 1 : num_lines] if num_lines else []
    port_lines = [*_lines(best.text), *border]
    return (
        environment()
        .from_string(template)
        .render(
            command=" ".join(python_args),
            names=(Path(python_args[0]).name, port_name),
            is_equal=best.is_equal,
            checks=check_lines(result),
            printed=best.differing_lines,
            doubts=best.doubts,
            findings=[(short_location(each.location), each.text, each.fix) for each in findings],
            notes=[(result.files.place(line), sentence) for line, sentence in best.notes],
            rows=list(
                _rows(
                    script_lines,
                    [*port_lines, *_lines(best.other_text)],
                    edit_reasons(best),
                    (num_lines or len(script_lines), len(port_lines)),
                )
            ),
        )
    )


def _lines(text: str) -> list[str]:
    """Split at line ends only, as Python numbers lines; `splitlines` splits at form feeds, too."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _rows(
    before: list[str], after: list[str], reasons: Sequence[tuple[int, str]], lengths: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each line that is shown, and an empty row where lines are left out.

    lengths  the number of lines of the first file before and after; the numbers of a second file begin at 1 again
    """
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for number, group in enumerate(matcher.get_grouped_opcodes(_CONTEXT_LINES)):
        if number:
            yield {"kind": "gap"}
        for kind, start, end, new_start, new_end in group:
            for offset in range(max(end - start, new_end - new_start)):
                old = start + offset if start + offset < end else None
                new = new_start + offset if new_start + offset < new_end else None
                old_line = (old if old is not None else end) + 1
                is_first_inserted = old is None and start + offset == end
                has_reasons = kind != "equal" and (old is not None or is_first_inserted)
                yield {
                    "kind": "same" if kind == "equal" else "changed",
                    "old": None if old is None else (_line_number(old, lengths[0]), before[old]),
                    "new": None if new is None else (_line_number(new, lengths[1]), after[new]),
                    "why": [text for line, text in reasons if line == old_line] if has_reasons else [],
                }


def _line_number(index: int, length: int) -> int:
    return index + 1 if index < length else index + 1 - length
