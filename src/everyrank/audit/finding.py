"""A finding: a mistake of a script, with its line, numbers and fix."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from everyrank.audit.likely_lines import likely_lines

__all__ = ["LEVELS", "Finding", "Findings"]

LEVELS = ("FAIL", "WARN", "PERF", "NOTE")
"""FAIL: results are wrong. WARN: they are wrong unless it is intended. PERF: it costs time. NOTE: good to know."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake in a line of the script.

    level   one of `LEVELS`
    rule    `kind.name`, for example "data.epoch"
    place   "/path/train.py:12", the innermost line of the user's own code; "" if there is none
    text    what is wrong, with numbers
    fix     what to write instead, in one line
    also    other lines that contribute to the mistake
    about_ranks  whether one rank with all samples would train differently from the first update on, so that a
                 comparison with one rank can refute the finding
    variables    variables of the line that the finding is about; () for all
    """

    level: str
    rule: str
    place: str
    text: str
    fix: str = ""
    also: tuple[str, ...] = ()
    about_ranks: bool = False
    variables: tuple[str, ...] = ()

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """At most four lines to look at, with the one to change most likely first."""
        return likely_lines(self.rule, self.place, self.also, self.variables)

    @property
    def shown_lines(self) -> tuple[str, ...]:
        """The lines to look at, if there are others besides the line of the finding."""
        return self.lines if set(self.lines) - {self.place} else ()

    def as_json(self) -> dict[str, Any]:
        """The finding as --json writes it."""
        values = dataclasses.asdict(self)
        del values["about_ranks"], values["variables"]
        return {**values, "also": list(self.also), "lines": list(self.lines)}


class Findings(list[Finding]):
    """The findings in the order in which rules add them, at most one for each rule and line.

    unchecked  sentences about what could not be checked
    replayed   results of --replay
    refuted    rules whose findings are no mistakes, as a comparison has shown
    """

    unchecked: list[str]
    replayed: list[str]
    refuted: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.unchecked, self.replayed, self.refuted = [], [], set()

    def add(
        self,
        level: str,
        rule: str,
        place: str,
        text: str,
        fix: str = "",
        also: tuple[str, ...] = (),
        *,
        about_ranks: bool = False,
        variables: tuple[str, ...] = (),
    ) -> None:
        """Add a finding, unless the same rule has reported this line already."""
        assert level in LEVELS, level
        if not any(known.rule == rule and known.place == place for known in self):
            other_lines = tuple(line for line in also if line and line != place)
            self.append(Finding(level, rule, place, text, fix, other_lines, about_ranks, variables))

    def not_checked(self, message: str) -> None:
        """Report something that could not be checked, for example because the script does not do it."""
        if message not in self.unchecked:
            self.unchecked.append(message)

    def downgrade_failures(self, rules: tuple[str, ...], reason: str) -> None:
        """Turn failures of these rules, or kinds of rules, into warnings, and add the reason to their text."""
        for index, finding in enumerate(self):
            if finding.level == "FAIL" and finding.rule.startswith(rules):
                self[index] = dataclasses.replace(finding, level="WARN", text=f"{finding.text}; {reason}")

    def refute(self, *rules: str) -> None:
        """Remove findings of these rules, and remember that the audit's findings of these rules are no mistakes."""
        self[:] = [finding for finding in self if finding.rule not in rules]
        self.refuted.update(rules)

    def has(self, *rules: str) -> bool:
        """Whether there is a finding of one of these rules, or kinds of rules ("data.")."""
        return any(known.rule.startswith(rules) for known in self)

    def worst_first(self) -> list[Finding]:
        """The findings by level, then in the order in which they were added."""
        return sorted(self, key=lambda finding: LEVELS.index(finding.level))


def short_place(place: str) -> str:
    """`train.py:12` for "/path/train.py:12"."""
    return Path(place).name if place else "?"
