"""A finding: a mistake of a script, with its line, numbers and fix."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from everyrank.audit.likely_lines import likely_lines

__all__ = ["LEVELS", "Finding", "Findings"]

LEVELS = ("FAIL", "WARN", "PERF", "NOTE")
"""FAIL: results are wrong. WARN: results may be wrong; the script may intend this. PERF: slow. NOTE: information."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake in a line of the script.

    level        one of `LEVELS`
    rule         `kind.name`, for example "data.epoch"
    location     "/path/train.py:12", the innermost line of the user's own code; "" if there is none
    text         what is wrong, with numbers
    fix          what to write instead, in one line
    other_lines  other lines that contribute to the mistake
    refuted_if_equal_to_one_rank  whether the finding is removed if one rank with all samples makes equal updates,
                                  because this mistake would change the first update
    variables    the variables in the line that `lines` traces back to other lines; () for all
    """

    level: str
    rule: str
    location: str
    text: str
    fix: str = ""
    other_lines: tuple[str, ...] = ()
    refuted_if_equal_to_one_rank: bool = False
    variables: tuple[str, ...] = ()

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """At most four lines to look at. The first is the one that most likely has to be changed."""
        return likely_lines(self.rule, self.location, self.other_lines, self.variables)

    @property
    def shown_lines(self) -> tuple[str, ...]:
        """The lines to look at, if there are others besides the line of the finding."""
        return self.lines if set(self.lines) - {self.location} else ()

    def as_json(self) -> dict[str, Any]:
        """The finding as --json writes it."""
        return {
            "level": self.level,
            "rule": self.rule,
            "place": self.location,
            "text": self.text,
            "fix": self.fix,
            "also": list(self.other_lines),
            "lines": list(self.lines),
        }


class Findings(list[Finding]):
    """The findings in the order in which rules add them, at most one for each rule and line.

    unchecked  sentences about what could not be checked
    replayed   results of --replay
    refuted    rules whose findings were false alarms, as a comparison has shown
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
        location: str,
        text: str,
        fix: str = "",
        other_lines: tuple[str, ...] = (),
        *,
        refuted_if_equal_to_one_rank: bool = False,
        variables: tuple[str, ...] = (),
    ) -> None:
        """Add a finding, unless the same rule has reported this line already."""
        assert level in LEVELS, level
        if not any(known.rule == rule and known.location == location for known in self):
            further_lines = tuple(line for line in other_lines if line and line != location)
            self.append(
                Finding(level, rule, location, text, fix, further_lines, refuted_if_equal_to_one_rank, variables)
            )

    def add_unchecked(self, message: str) -> None:
        """Report a check that was impossible, for example because the script has no evaluation."""
        if message not in self.unchecked:
            self.unchecked.append(message)

    def downgrade_failures(self, rules: tuple[str, ...], reason: str) -> None:
        """Turn failures of these rules, or kinds of rules, into warnings, and add the reason to their text."""
        for index, finding in enumerate(self):
            if finding.level == "FAIL" and finding.rule.startswith(rules):
                self[index] = dataclasses.replace(finding, level="WARN", text=f"{finding.text}; {reason}")

    def refute(self, *rules: str) -> None:
        """Remove findings of these rules, and add the rules to `refuted`.

        `relations.with_comparison` reads `refuted`, and removes these findings from the audit that it is given, too.
        """
        self[:] = [finding for finding in self if finding.rule not in rules]
        self.refuted.update(rules)

    def has(self, *rules: str) -> bool:
        """Whether there is a finding of one of these rules, or kinds of rules ("data.")."""
        return any(known.rule.startswith(rules) for known in self)

    def worst_first(self) -> list[Finding]:
        """The findings by level, then in the order in which they were added."""
        return sorted(self, key=lambda finding: LEVELS.index(finding.level))


def short_location(location: str) -> str:
    """`train.py:12` for "/path/train.py:12"."""
    return Path(location).name if location else "?"
