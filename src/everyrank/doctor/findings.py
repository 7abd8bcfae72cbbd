"""What one look at something came to: one line, and the fix where there is one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "OK", "PROBLEM", "WARNING", "Finding", "absent", "ok", "problem", "warning"]

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"


@dataclass(frozen=True)
class Finding:
    """One line.

    what     what was looked at
    status   ok; warning: it works here, and would not always; problem: runs fail or come out wrong; absent: not there
    text     what was found, with the value
    fix      what to do about it
    """

    what: str
    status: str
    text: str
    fix: str | None = None

    @property
    def line(self) -> str:
        """As one sentence."""
        return f"{self.what}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(what: str, text: str) -> Finding:
    """All is well."""
    return Finding(what, OK, text)


def warning(what: str, text: str, fix: str) -> Finding:
    """It works here, and would not always."""
    return Finding(what, WARNING, text, fix)


def problem(what: str, text: str, fix: str) -> Finding:
    """Runs fail, or come out wrong."""
    return Finding(what, PROBLEM, text, fix)


def absent(what: str, text: str, fix: str | None = None) -> Finding:
    """It is not there, which is no fault."""
    return Finding(what, ABSENT, text, fix)
