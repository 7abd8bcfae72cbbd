"""The facts of a run by their kinds, with the values that the names of the script had at each expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import ScriptSource

__all__ = ["ObservedRun"]


class ObservedRun:
    """The facts of a run of the script."""

    def __init__(self, source: ScriptSource, facts: Sequence[Fact]) -> None:
        self.source, self.facts = source, facts

    def of(self, kind: str) -> list[Fact]:
        """Those of a kind, in the order of the run."""
        return [fact for fact in self.facts if fact.kind == kind]

    def details(self, loader: int) -> dict[str, Any]:
        """What is known of a loader, by its identity."""
        return next(fact.details for fact in self.of("loader_details") if fact.details["id"] == loader)
