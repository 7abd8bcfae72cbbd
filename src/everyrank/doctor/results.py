"""What one look at something came to: one line, and the fix where there is one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "OK", "PROBLEM", "WARNING", "CheckResult", "absent", "ok", "problem", "warning"]

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"


@dataclass(frozen=True)
class CheckResult:
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


def ok(subject: str, text: str, private: bool = False) -> CheckResult:
    """All is well."""
    return CheckResult(subject, OK, text, private=private)


def warning(subject: str, text: str, fix: str, private: bool = False) -> CheckResult:
    """It works here, and would not always."""
    return CheckResult(subject, WARNING, text, fix, private)


def problem(subject: str, text: str, fix: str, private: bool = False) -> CheckResult:
    """Runs fail, or come out wrong."""
    return CheckResult(subject, PROBLEM, text, fix, private)


def absent(subject: str, text: str, fix: str | None = None) -> CheckResult:
    """It is not there, which is no fault."""
    return CheckResult(subject, ABSENT, text, fix)
