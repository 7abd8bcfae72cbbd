"""What one check of a script came to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

__all__ = ["LEVELS", "Finding", "Findings"]

LEVELS = ("FAIL", "WARN", "PERF", "NOTE")
"""FAIL: the numbers are wrong. WARN: they are, unless it is meant so. PERF: it costs time. NOTE: good to know."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the script, what is wrong there, the numbers that show it, and what to write instead.

    level   one of `LEVELS`
    rule    `kind.name`, e.g. "data.epoch": what was checked
    place   "/path/train.py:12", the innermost line of the person's own; "" where there is none
    text    what was seen, with numbers
    fix     one line
    also    further places that have to do with it
    """

    level: str
    rule: str
    place: str
    text: str
    fix: str = ""
    also: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As written by --json."""
        return {**dataclasses.asdict(self), "also": list(self.also)}


class Findings(list[Finding]):
    """In the order found; one for each rule and line: the first update that shows it is enough."""

    unchecked: list[str]
    replayed: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.unchecked, self.replayed = [], []

    def add(self, level: str, rule: str, place: str, text: str, fix: str = "", also: tuple[str, ...] = ()) -> None:
        """Keep it unless the same rule has named that line already."""
        assert level in LEVELS, level
        if not any(known.rule == rule and known.place == place for known in self):
            self.append(Finding(level, rule, place, text, fix, tuple(one for one in also if one and one != place)))

    def not_checked(self, what: str) -> None:
        """Say what this script gave no occasion to check, or what cannot be."""
        if what not in self.unchecked:
            self.unchecked.append(what)

    def has(self, *rules: str) -> bool:
        """Whether one of these rules, or kinds of rules ("data."), has found something."""
        return any(known.rule.startswith(rules) for known in self)

    def worst_first(self) -> list[Finding]:
        """By level, then in the order found."""
        return sorted(self, key=lambda finding: LEVELS.index(finding.level))


def short_place(place: str) -> str:
    """`train.py:12` of a whole path with its line."""
    return Path(place).name if place else "?"
