"""What `everyrank comm` has measured: a table for each operation, and JSON with the fitted costs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from everyrank._version import __version__
from everyrank.collectives.cost import Cost, fit_cost
from everyrank.collectives.question import size_text
from everyrank.report.table import Table
from everyrank.report.terminal import print_table

__all__ = ["comm_json", "print_comm"]

_HEADER = ["operation", "bytes", "mean us", "p50 us", "p99 us", "algorithm GB/s", "bus GB/s", "calls", "wrong"]


def print_comm(rows: Sequence[dict[str, Any]], world: dict[str, Any]) -> None:
    """A table with the sizes of each operation, and the line that fits its times below it."""
    if not rows:
        return
    shown: list[list[str]] = []
    notes: list[str] = []
    for name, sizes, cost in _operations(rows):
        shown += [_cells(name if place == 0 else "", row) for place, row in enumerate(sizes)]
        if cost is not None:
            notes.append(f"{name}: {_cost_text(cost)}")
        steps = [row for row in sizes if row["steps"] is not None]
        if steps:
            last = steps[-1]
            sent = size_text(last["sent_bytes"])
            notes.append(f"{name}: the busiest rank sends {sent} in {last['steps']} steps for the last size")
    first = rows[0]
    heading = f"{first['backend']}, {world['size']} ranks on {world['device']}, {first['dtype']}"
    if first["ranks"] != world["size"]:
        heading += f", in groups of {first['ranks']}"
    wrong = sum(row["num_wrong"] for row in rows)
    notes.append(f"{wrong} wrong elements" if wrong else "no wrong element")
    print_table(heading, Table(_HEADER, shown, []), notes)


def _operations(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]], Cost | None]]:
    """Of each operation its name, its rows, and what fits their times."""
    for name, group in itertools.groupby(rows, key=_name):
        sizes = list(group)
        yield name, sizes, _cost(sizes)


def _name(row: dict[str, Any]) -> str:
    parts = [row["reduction"] if row["reduction"] not in (None, "sum") else "", row["algorithm"] or ""]
    parts.append("async" if row["is_async"] else "")
    more = " ".join(filter(None, parts))
    return f"{row['operation']} {more}".strip()


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    size = size_text(row["num_bytes"]) if row["num_bytes"] else "-"
    if row["refused"] is not None:
        return [name, size, f"not offered: {row['refused']}", "", "", "", "", "0", ""]
    times = [f"{row[key] * 1e6:,.1f}" for key in ("mean_seconds", "p50_seconds", "p99_seconds")]
    rates = ["-" if row[key] is None else f"{row[key] / 1e9:.3g}" for key in ("algorithm_bandwidth", "bus_bandwidth")]
    return [name, size, *times, *rates, str(row["calls"]), str(row["num_wrong"])]


def _cost(rows: Sequence[dict[str, Any]]) -> Cost | None:
    """Fitted to the median times of one operation; None where there are fewer than three sizes."""
    known = [row for row in rows if row["p50_seconds"] is not None and row["num_bytes"]]
    if len(known) < 3:
        return None
    return fit_cost([row["num_bytes"] for row in known], [row["p50_seconds"] for row in known])


def _cost_text(cost: Cost) -> str:
    latency = f"{cost.latency_seconds * 1e6:,.1f} us"
    rate = f" + bytes / {cost.bytes_per_second / 1e9:.3g} GB/s" if cost.bytes_per_second < float("inf") else ""
    return f"{latency}{rate} (median error {cost.median_error:.0%}, largest {cost.largest_error:.0%})"


def comm_json(rows: Sequence[dict[str, Any]], world: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`rows` as they were measured, `costs` of each operation, and where they come from."""
    costs: list[dict[str, Any]] = []
    for name, sizes, cost in _operations(rows):
        if cost is not None:
            keys = ("backend", "operation", "algorithm", "reduction", "dtype", "is_async", "ranks")
            fitted = {key: None if value == float("inf") else value for key, value in dataclasses.asdict(cost).items()}
            costs.append({"name": name, **{key: sizes[0][key] for key in keys}, **fitted})
    return {
        "schema": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["everyrank", *words],
        "everyrank": __version__,
        "world": world,
        "rows": list(rows),
        "costs": costs,
    }
