"""ObservedRun: the facts of a run by kind."""

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
        """Return the facts of a kind, in the order of the run."""
        return [fact for fact in self.facts if fact.kind == kind]

    def details(self, loader: int) -> dict[str, Any]:
        """Return the details of the loader with this identity."""
        return next(fact.details for fact in self.of("loader_details") if fact.details["id"] == loader)
