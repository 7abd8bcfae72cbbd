"""The results of `everyrank chaos` as a table for the terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everyrank.errors import printable
from everyrank.record import Record

__all__ = ["chaos_line", "has_held", "is_chaos_record", "print_chaos"]

_COLUMNS = ("fault", "update", "rank", "noticed by", "after s", "back after s", "updates lost", "trajectory", "")
_TOLERANCE_NOTE = "equal (x): the losses differ by at most x. "
_NOT_BITWISE = (
    f"{_TOLERANCE_NOTE}DDP rebuilds its buckets after its first update, also after a restart: "
    "until both runs have done this, they add up gradients in a different order"
)
_GLOO_NOT_BITWISE = (
    f"{_TOLERANCE_NOTE}with more than two ranks gloo adds up in the order of arrival: "
    "two runs without a fault also differ"
)
_NUMBERS = ("update", "rank", "after s", "back after s", "updates lost")


_NUMBER = int | float | None
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("fault", "status"), str),
    **dict.fromkeys(("update", "rank"), int),
}
_FIELDS_OF_A_RUN: dict[str, Any] = {
    **dict.fromkeys(("seen_by", "said"), str),
    **dict.fromkeys(("notice_seconds", "recover_seconds"), _NUMBER),
    "is_noticed": bool,
    "updates_lost": int | None,
}
_NOT_RUN = "not run here"


def is_chaos_record(record: Record) -> bool:
    """Whether this is a Record of an injected fault, with all its fields. The file may be untrusted."""
    outcome = record.provenance.get("chaos")
    if not isinstance(outcome, dict):
        return False
    fields = _FIELDS if outcome.get("status") == _NOT_RUN else _FIELDS | _FIELDS_OF_A_RUN
    return all(isinstance(outcome.get(name), kind) for name, kind in fields.items()) and isinstance(
        outcome.get("reason", ""), str
    )


def has_held(record: Record) -> bool:
    """Whether the fault was noticed in time and the resumed training is equal, or a known reason prevents this."""
    return record.provenance["chaos"]["status"] in ("held", "unseen", _NOT_RUN)


def print_chaos(records: Sequence[Record]) -> None:
    """Print a table for each layout and backend, then the messages of failed and skipped faults."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=180)
    for layout, backend in dict.fromkeys((record.layout, record.backend) for record in records):
        rows = [record for record in records if (record.layout, record.backend) == (layout, backend)]
        first = rows[0]
        title = f"{first.workload} · {layout} · {first.world_size} on {first.device} ({backend})"
        table = Table(title=Text(printable(title)), title_justify="left")  # rich would read [markup] in a str
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left")
        for record in rows:
            table.add_row(*[Text(printable(cell)) for cell in _cells(record)])
        console.print(table)
        if any(record.parity.status == "equal" and not record.parity.bitwise for record in rows):
            console.print(Text(_GLOO_NOT_BITWISE if backend == "gloo" else _NOT_BITWISE, style="dim"))
        for record in rows:
            for line in _notes_below(record):
                console.print(Text(printable(line), style="dim"))


def chaos_line(record: Record) -> str:
    """Return the result of one fault in a line."""
    outcome = record.provenance["chaos"]
    return printable(f"{record.layout} · {outcome['fault']} at update {outcome['update']}: {outcome['status']}")


def _cells(record: Record) -> list[str]:
    outcome: dict[str, Any] = record.provenance["chaos"]
    if outcome["status"] == _NOT_RUN:
        return [outcome["fault"], "", "", "", "", "", "", "", _NOT_RUN]
    noticed_by = outcome["seen_by"] if outcome["is_noticed"] else "NO PROCESS"
    return [
        outcome["fault"],
        str(outcome["update"]),
        str(outcome["rank"]),
        noticed_by,
        _number(outcome["notice_seconds"], ".1f"),
        _number(outcome.get("recover_seconds"), ".1f"),
        _number(outcome.get("updates_lost"), "d"),
        _trajectory(record),
        outcome["status"],
    ]


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else ""


def _trajectory(record: Record) -> str:
    parity = record.parity
    if parity.status == "equal":
        return "equal to the last bit" if parity.bitwise else f"equal ({parity.max_relative_difference:.0e})"
    difference = parity.max_relative_difference
    return f"differs: {parity.first_divergence}" + (f" ({difference:.0e})" if difference is not None else "")


def _notes_below(record: Record) -> list[str]:
    outcome = record.provenance["chaos"]
    lines = [f"{outcome['fault']}: {outcome['reason']}"] if outcome.get("reason") else []
    if not has_held(record):
        lines += [
            f"{outcome['fault']}: {text}" for text in (outcome.get("said"), outcome.get("recovery_failed")) if text
        ]
    return lines
