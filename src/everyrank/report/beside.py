"""Compare sets of Records: for example the same layouts measured on two commits or two machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from everyrank.record import Interval, Record
from everyrank.report.rows import is_checked
from everyrank.report.table import Table

__all__ = ["Sets", "beside_notes", "beside_table", "matching"]

Sets = Mapping[str, Sequence[Record]]
"""The name of each set (its file) and its Records, in the order in which they were given."""

_SOURCES = ("commit", "everyrank", "torch", "python", "processor", "cores", "accelerator", "command", "settings")


def matching(sets: Sets) -> list[tuple[str, list[Record | None]]]:
    """Return (label, its Record in each set) for each layout with a checked throughput in at least two sets."""
    rows: dict[tuple[object, ...], list[Record | None]] = {}
    for index, records in enumerate(sets.values()):
        for record in records:
            if is_checked(record) and record.throughput_samples_per_second is not None:
                settings = str(record.provenance.get("global_batch")), str(record.provenance.get("settings"))
                key = (record.workload, record.layout, record.world_size, record.device, settings)
                row = rows.setdefault(key, [None] * len(sets))
                row[index] = row[index] or record
    return [
        (f"{workload} · {text} · {size} rank{'s' * (size != 1)}", row)
        for (workload, text, size, _, _), row in rows.items()
        if sum(record is not None for record in row) > 1
    ]


def beside_table(sets: Sets) -> Table | None:
    """Return a table of throughputs, the ratio of last to first, and the loss difference; None if no layout matches."""
    pairs = matching(sets)
    if not pairs:
        return None
    rows: list[list[str]] = []
    for name, row in pairs:
        present = [record for record in row if record is not None]
        first, last = present[0], present[-1]
        ratio, verdict = _ratio(first, last)
        cells = [_text(record.throughput_samples_per_second) if record is not None else "" for record in row]
        rows.append([name, *cells, ratio, verdict, _loss_gap(first, last)])
    speeds = [f"{name}: samples/s" for name in sets]
    return Table(["workload · layout · ranks", *speeds, "ratio", "95% intervals", "losses apart"], rows)


def _ratio(first: Record, last: Record) -> tuple[str, str]:
    before, after = first.throughput_samples_per_second, last.throughput_samples_per_second
    assert before is not None
    assert after is not None
    if not before.median or any(math.isnan(value) for value in (before.low, before.high, after.low, after.high)):
        return "", "?"
    ratio = f"{after.median / before.median:.3f}"
    if after.low > before.high:
        return ratio, "apart: faster"
    if after.high < before.low:
        return ratio, "apart: slower"
    return ratio, "overlap"


def _text(value: Interval | None) -> str:
    return f"{value.median:,.0f} ({value.low:,.0f} to {value.high:,.0f})" if value else ""


def _loss_gap(first: Record, last: Record) -> str:
    """Return the largest relative loss difference over the updates that both Records contain."""
    pairs = list(zip(first.loss, last.loss, strict=False))
    if not pairs:
        return ""
    gaps = [abs(a - b) / abs(a) if a else abs(b) for a, b in pairs]
    return "?" if any(math.isnan(gap) for gap in gaps) else f"{max(gaps):.1e}"


def beside_notes(sets: Sets) -> list[str]:
    """Return a note for each setting (commit, torch, processor, ...) that differs between the sets."""
    notes: list[str] = []
    for key in _SOURCES:
        values = {name: str(records[0].provenance.get(key)) for name, records in sets.items() if records}
        if len(set(values.values())) > 1:
            notes.append(f"{key}: " + "; ".join(f"{name} has {value}" for name, value in values.items()))
    return notes
