"""What one look at something came to: one line, and the fix where there is one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "OK", "PROBLEM", "WARNING", "Finding", "absent", "ok", "problem", "warning"]

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"


@dataclass(frozen=True)
class Finding:
    """One line.

    what      what was looked at
    status    ok; warning: it works here, and would not always; problem: runs fail or come out wrong; absent: not there
    text      what was found, with the value
    fix       what to do about it
    private   whether the text may hold names, addresses or paths that are nobody else's business
    """

    what: str
    status: str
    text: str
    fix: str | None = None
    private: bool = False

    @property
    def line(self) -> str:
        """As one sentence."""
        return f"{self.what}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(what: str, text: str, private: bool = False) -> Finding:
    """All is well."""
    return Finding(what, OK, text, private=private)


def warning(what: str, text: str, fix: str, private: bool = False) -> Finding:
    """It works here, and would not always."""
    return Finding(what, WARNING, text, fix, private)


def problem(what: str, text: str, fix: str, private: bool = False) -> Finding:
    """Runs fail, or come out wrong."""
    return Finding(what, PROBLEM, text, fix, private)


def absent(what: str, text: str, fix: str | None = None) -> Finding:
    """It is not there, which is no fault."""
    return Finding(what, ABSENT, text, fix)
