"""What was seen of a run, with the values that the names of the script had at each expression."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from everyrank.port.source import ScriptSource

__all__ = ["ObservedRun", "ScriptEvent", "Site", "read_events"]


@dataclasses.dataclass(frozen=True)
class Site:
    """One line of the stack in the script: [first line, column, last line, column], its function and its names.

    values  name -> [kind, text, identity], as rerun/inside/setup.py records them; {} where they were recorded before
    """

    span: tuple[int, int, int, int]
    function: str
    values: dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class ScriptEvent:
    """An expression that made a loader, called the model, ... as in facts.py, with the names of the script.

    sites     the calls of the script that led there, the innermost first
    is_inner  whether the innermost line of the user's own code stands in the script
    file      the file of that line
    number    its place in the order of the run
    """

    kind: str
    sites: tuple[Site, ...]
    is_inner: bool
    details: dict[str, Any]
    file: str
    number: int

    @property
    def span(self) -> tuple[int, int, int, int]:
        """The place of the innermost expression in the script."""
        return self.sites[0].span

    @property
    def line(self) -> int:
        """Its first line."""
        return self.sites[0].span[0]


def read_events(records: Sequence[dict[str, Any]], script: str) -> list[ScriptEvent]:
    """The events that a line of the script led to."""
    events: list[ScriptEvent] = []
    main = os.path.normpath(script)
    for number, record in enumerate(records):
        chain = record["chain"]
        values = record.get("values") or [{} for _ in chain]
        sites = tuple(
            Site((line, column, last, end), name, names)
            for (file, line, column, last, end, name), names in zip(chain, values, strict=False)
            if os.path.normpath(file) == main
        )
        if sites:
            details = {name: value for name, value in record.items() if name not in ("kind", "chain", "values")}
            is_inner = os.path.normpath(chain[0][0]) == main
            events.append(ScriptEvent(record["kind"], sites, is_inner, details, chain[0][0], number))
    return events


class ObservedRun:
    """The events of the run by their kinds."""

    def __init__(self, source: ScriptSource, events: Sequence[ScriptEvent]) -> None:
        self.source, self.events = source, events

    def of(self, kind: str) -> list[ScriptEvent]:
        """Those of a kind, in the order of the run."""
        return [event for event in self.events if event.kind == kind]

    def details(self, loader: int) -> dict[str, Any]:
        """What is known of a loader, by its identity."""
        return next(event.details for event in self.of("loader_details") if event.details["id"] == loader)
