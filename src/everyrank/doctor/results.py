"""CheckResult: the result of one check in one line, with a fix if there is one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "OK", "PROBLEM", "WARNING", "CheckResult", "absent", "ok", "problem", "warning"]

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    what      the subject of the check
    status    ok; warning: may fail in other runs; problem: runs fail or are wrong; absent: not available
    text      the result, with the value
    fix       how to fix it
    private   whether the text may contain private names, addresses or paths
    """

    what: str
    status: str
    text: str
    fix: str | None = None
    private: bool = False

    @property
    def line(self) -> str:
        """The result as one sentence."""
        return f"{self.what}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(subject: str, text: str, private: bool = False) -> CheckResult:
    """Return a result without a problem."""
    return CheckResult(subject, OK, text, private=private)


def warning(subject: str, text: str, fix: str, private: bool = False) -> CheckResult:
    """Return a result that may fail in other runs."""
    return CheckResult(subject, WARNING, text, fix, private)


def problem(subject: str, text: str, fix: str, private: bool = False) -> CheckResult:
    """Return a problem: runs fail or are wrong."""
    return CheckResult(subject, PROBLEM, text, fix, private)


def absent(subject: str, text: str, fix: str | None = None) -> CheckResult:
    """Return a result for something optional that is not available."""
    return CheckResult(subject, ABSENT, text, fix)
