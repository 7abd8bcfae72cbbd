"""What came of faults, as a table for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everyrank.errors import printable
from everyrank.record import Record

__all__ = ["chaos_line", "has_held", "is_of_chaos", "print_chaos"]

_COLUMNS = ("fault", "update", "rank", "noticed by", "after s", "back after s", "updates lost", "trajectory", "")
_APART = "equal (x): the losses are at most x apart. "
_NOT_BITWISE = (
    f"{_APART}DDP rebuilds its buckets after its first update, also after a restart: "
    "from there to where the first run had done so, gradients are added up in another order"
)
_GLOO_NOT_BITWISE = (
    f"{_APART}gloo adds what more than two ranks send in the order of its coming: "
    "two runs without a fault differ by as much"
)
_NUMBERS = ("update", "rank", "after s", "back after s", "updates lost")


_NUMBER = int | float | None
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("fault", "status"), str),
    **dict.fromkeys(("update", "rank"), int),
}
_FIELDS_OF_A_TRIED_ONE: dict[str, Any] = {
    **dict.fromkeys(("seen_by", "said"), str),
    **dict.fromkeys(("notice_seconds", "recover_seconds"), _NUMBER),
    "is_noticed": bool,
    "updates_lost": int | None,
}
_NOT_RUN = "not run here"


def is_of_chaos(record: Record) -> bool:
    """Whether a Record, from wherever it comes, says what came of a fault."""
    told = record.provenance.get("chaos")
    if not isinstance(told, dict):
        return False
    fields = _FIELDS if told.get("status") == _NOT_RUN else _FIELDS | _FIELDS_OF_A_TRIED_ONE
    return all(isinstance(told.get(name), kind) for name, kind in fields.items()) and isinstance(
        told.get("reason", ""), str
    )


def has_held(record: Record) -> bool:
    """Whether all held that has to: noticed in time, recovered, the same training; or a reason is known why not."""
    return record.provenance["chaos"]["status"] in ("held", "unseen", _NOT_RUN)


def print_chaos(records: Sequence[Record]) -> None:
    """A table for each layout and backend; below it what was said of faults that did not hold, or were not tried."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=180)
    for layout, backend in dict.fromkeys((record.layout, record.backend) for record in records):
        rows = [record for record in records if (record.layout, record.backend) == (layout, backend)]
        first = rows[0]
        title = f"{first.workload} · {layout} · {first.world_size} on {first.device} ({backend})"
        table = Table(title=printable(title), title_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left")
        for record in rows:
            table.add_row(*map(Text, _cells(record)))
        console.print(table)
        if any(record.parity.status == "equal" and not record.parity.bitwise for record in rows):
            console.print(Text(_GLOO_NOT_BITWISE if backend == "gloo" else _NOT_BITWISE, style="dim"))
        for record in rows:
            for line in _below(record):
                console.print(Text(printable(line), style="dim"))


def chaos_line(record: Record) -> str:
    """One fault in a line: what happened, and how it ended."""
    told = record.provenance["chaos"]
    return printable(f"{record.layout} · {told['fault']} at update {told['update']}: {told['status']}")


def _cells(record: Record) -> list[str]:
    told: dict[str, Any] = record.provenance["chaos"]
    if told["status"] == _NOT_RUN:
        return [told["fault"], "", "", "", "", "", "", "", _NOT_RUN]
    said_by = told["seen_by"] if told["is_noticed"] else "NOBODY"
    return [
        told["fault"],
        str(told["update"]),
        str(told["rank"]),
        said_by,
        _number(told["notice_seconds"], ".1f"),
        _number(told.get("recover_seconds"), ".1f"),
        _number(told.get("updates_lost"), "d"),
        _trajectory(record),
        told["status"],
    ]


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else ""


def _trajectory(record: Record) -> str:
    parity = record.parity
    if parity.status == "equal":
        return "equal to the last bit" if parity.bitwise else f"equal ({parity.max_relative_difference:.0e})"
    far = parity.max_relative_difference
    return f"differs: {parity.first_divergence}" + (f" ({far:.0e})" if far is not None else "")


def _below(record: Record) -> list[str]:
    told = record.provenance["chaos"]
    lines = [f"{told['fault']}: {told['reason']}"] if told.get("reason") else []
    if not has_held(record):
        lines += [f"{told['fault']}: {text}" for text in (told.get("said"), told.get("recovery_failed")) if text]
    return lines
