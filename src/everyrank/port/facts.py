"""Fact: an expression of the script that a run evaluated, with its position and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CallSite", "Fact", "read_facts"]


@dataclasses.dataclass(frozen=True)
class CallSite:
    """One line of the stack of the user's own code: [first line, column, last line, column], and its function.

    values  name -> [kind, text, identity], as rerun/inside/setup.py records them; {} if it does not, or if an earlier
            record has them
    """

    file: str
    span: tuple[int, int, int, int]
    function: str
    values: dict[str, list[Any]] = dataclasses.field(default_factory=dict[str, list[Any]])


@dataclasses.dataclass(frozen=True)
class Fact:
    """An expression of the script that made a loader, called the model, saved a file, ...

    kind      "loader", "pass", "forward", "loss", "backward", "optimizer", "step", "write", "read", "seed" or "draw"
    chain     the calls of the script that led to the expression, the innermost first
    is_inner  whether the innermost line of the user's code is in the script, not in another file
    details   other facts: see rerun/inside/expressions.py
    file      the file of the innermost line of the user's code
    number    its position in the order of the run
    """

    kind: str
    chain: tuple[CallSite, ...]
    is_inner: bool
    details: dict[str, Any]
    file: str = ""
    number: int = 0

    @property
    def span(self) -> tuple[int, int, int, int]:
        """The position of the innermost expression."""
        return self.chain[0].span

    @property
    def line(self) -> int:
        """The first line of the innermost expression."""
        return self.chain[0].span[0]


def read_facts(records: Sequence[dict[str, Any]], offsets: Mapping[str, int]) -> list[Fact]:
    """Return the facts about the edited files: a call in another file counts for the line that led to it.

    offsets  path of each file -> number of lines before it in the text to edit
    """
    facts: list[Fact] = []
    for number, record in enumerate(records):
        values = record.get("values") or [{} for _ in record["chain"]]
        calls = [
            CallSite(
                file,
                (line + (offset := offsets.get(file, 0)), column, last_line + offset, end_column),
                name,
                values_by_name,
            )
            for (file, line, column, last_line, end_column, name), values_by_name in zip(
                record["chain"], values, strict=False
            )
        ]
        chain = tuple(call for call in calls if call.file in offsets)
        details = {name: value for name, value in record.items() if name not in ("kind", "chain", "values")}
        if chain:
            is_inner = calls[0].file in offsets
            facts.append(Fact(record["kind"], chain, is_inner, details, calls[0].file, number))
    return facts
