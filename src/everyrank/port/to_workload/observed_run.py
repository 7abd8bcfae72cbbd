"""ObservedRun: the facts that a run of the script recorded, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import ScriptSource

__all__ = ["ObservedRun"]


class ObservedRun:
    """The facts that a run of the script recorded. Each is a call at a line of the source."""

    def __init__(self, source: ScriptSource, facts: Sequence[Fact]) -> None:
        self.source, self.facts = source, facts

    def facts_of(self, kind: str) -> list[Fact]:
        """Return the facts of this kind, in the order of the run."""
        return [fact for fact in self.facts if fact.kind == kind]

    def loader_details(self, loader_id: int) -> dict[str, Any]:
        """Return the recorded details of the DataLoader with this id."""
        return next(fact.details for fact in self.facts_of("loader_details") if fact.details["id"] == loader_id)
