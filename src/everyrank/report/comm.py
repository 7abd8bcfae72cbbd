"""The results of `everyrank comm`: a table, and JSON with the fitted costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from everyrank._version import __version__
from everyrank.collectives.cost import Cost, fit_cost
from everyrank.collectives.options import size_text
from everyrank.report.table import Table
from everyrank.report.terminal import print_table

__all__ = [
    "by_line",
    "candidate_name",
    "comm_cost_table",
    "comm_json",
    "comm_notes",
    "comm_table",
    "comm_title",
    "has_failed",
    "print_comm",
]

_HEADER = ["operation", "bytes", "mean us", "p50 us", "p99 us", "algorithm GB/s", "bus GB/s", "calls", "wrong"]
_CANDIDATE = ("backend", "algorithm")
_LINE = ("backend", "operation", "algorithm", "reduction", "dtype", "is_async", "ranks")
_Row = Mapping[str, Any]


def comm_json(results: _Row, argv: Sequence[str]) -> dict[str, Any]:
    """Return the JSON document with `costs` and the `rows` that they are fitted to; schema: docs/collectives.md.

    `results` come from `collectives.rank.comm_rank`.
    """
    costs: list[dict[str, Any]] = []
    for rows in by_line(results["rows"]):
        cost = _cost(rows)
        if cost is not None:
            fitted = {key: None if value == float("inf") else value for key, value in dataclasses.asdict(cost).items()}
            sizes = [row["num_bytes"] for row in rows if row["p50_seconds"] is not None]
            size_range = {"least_bytes": min(sizes), "most_bytes": max(sizes)}
            costs.append({"name": _name(rows[0]), **{key: rows[0][key] for key in _LINE}, **fitted, **size_range})
    return {
        "schema": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["everyrank", *argv],
        "everyrank": __version__,
        "world": results["world"],
        "machine": results["machine"],
        "rows": results["rows"],
        "costs": costs,
        "copy": results["copy"],
        "strides": results["strides"],
    }


def has_failed(measured: _Row) -> bool:
    """Whether an operation returned a wrong element that counts as a failure."""
    return any(row["num_wrong"] for row in measured["rows"]) or any(row["is_failure"] for row in measured["strides"])


def print_comm(measured: _Row) -> None:
    """Print a table of all operations and sizes, then the fitted costs and the notes."""
    if measured["rows"]:
        print_table(comm_title(measured), comm_table(measured), [*cost_notes(measured), *comm_notes(measured)])


def comm_title(measured: _Row) -> str:
    """Return the heading of the table."""
    first, world = measured["rows"][0], measured["world"]
    heading = f"{', '.join(world['backends'])}, {world['size']} ranks on {world['device']}, {first['dtype']}"
    return f"{heading}, in groups of {first['ranks']}" if first["ranks"] != world["size"] else heading


def comm_table(measured: _Row, repeats: bool = False) -> Table:
    """Return a table with a row for each operation, size, backend and algorithm.

    Without `repeats`, cells that repeat the name of the row above are empty.
    """
    rows = measured["rows"]
    candidates = list(dict.fromkeys(map(candidate_name, rows)))
    header = list(_HEADER)
    if len(candidates) < 2:
        cells, num_names = [[_name(row), _size(row), *_cells(row)] for row in rows], 1
    else:
        cells = [
            [_name(row, with_candidate=False), _size(row), candidate_name(row), *_cells(row), *_speedups(row)]
            for row in rows
        ]
        header, num_names = [*_HEADER[:2], "by", *_HEADER[2:], f"x {candidates[0]}: mean", "p50"], 2
    if not repeats:
        cells = [_without_repeats(row, previous, num_names) for row, previous in _with_previous(cells)]
    return Table(header, cells, [])


def _with_previous(rows: Sequence[list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each row with the row above it."""
    return zip(rows, [[], *rows[:-1]] if rows else [], strict=True)


def _without_repeats(row: list[str], previous: list[str], count: int) -> list[str]:
    """Return the row, in which those of the first `count` cells are empty that equal the row above."""
    num_same = next((index for index in range(count) if row[: index + 1] != previous[: index + 1]), count)
    return [""] * num_same + row[num_same:]


def _size(row: _Row) -> str:
    return size_text(row["num_bytes"]) if row["num_bytes"] else "-"


def _speedups(row: _Row) -> list[str]:
    values = (row["mean_speedup"], row["p50_speedup"])
    return ["" if value is None else f"{value:.2f}" for value in values]


def _cells(row: _Row) -> list[str]:
    if row["refused"] is not None:
        return ["not supported", "", "", "", "", "0", ""]
    times = [f"{row[key] * 1e6:,.1f}" for key in ("mean_seconds", "p50_seconds", "p99_seconds")]
    rates = ["-" if row[key] is None else f"{row[key] / 1e9:.3g}" for key in ("algorithm_bandwidth", "bus_bandwidth")]
    return [*times, *rates, str(row["calls"]), str(row["num_wrong"])]


def candidate_name(row: _Row) -> str:
    """Return `gloo`, or `gloo ring` for an algorithm over gloo."""
    return " ".join(row[key] for key in _CANDIDATE if row[key])


def _name(row: _Row, with_candidate: bool = True) -> str:
    parts = [row["operation"], row["reduction"] if row["reduction"] not in (None, "sum") else ""]
    parts += [row["algorithm"] or "" if with_candidate else "", "async" if row["is_async"] else ""]
    return " ".join(filter(None, parts))


def by_line(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Group rows by everything but the size: each group is one line of a chart, and gets one fitted cost."""
    lines: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in _LINE), []).append(row)
    return list(lines.values())


def _cost(rows: Sequence[_Row]) -> Cost | None:
    """Fit a cost to the median times of one operation; None with fewer than three sizes."""
    measured_rows = [row for row in rows if row["p50_seconds"] is not None and row["num_bytes"]]
    if len(measured_rows) < 3:
        return None
    return fit_cost([row["num_bytes"] for row in measured_rows], [row["p50_seconds"] for row in measured_rows])


def comm_cost_table(measured: _Row) -> Table:
    """Return a table of the fitted costs."""
    rows = [
        [
            _name(cost, with_candidate=False),
            candidate_name(cost),
            f"{cost['latency_seconds'] * 1e6:,.1f}",
            "-" if cost["bytes_per_second"] is None else f"{cost['bytes_per_second'] / 1e9:.3g}",
            f"{cost['median_error']:.0%}",
            f"{cost['largest_error']:.0%}",
        ]
        for cost in measured["costs"]
    ]
    return Table(["operation", "by", "latency us", "GB/s", "median error", "largest error"], rows, [])


def cost_notes(measured: _Row) -> list[str]:
    """Return each fitted cost as a sentence."""
    return [f"{_line_name(cost, measured)}: {_cost_text(cost)}" for cost in measured["costs"]]


def comm_notes(measured: _Row) -> list[str]:
    """Return notes on algorithms, unsupported operations and strided tensors; the last counts wrong elements."""
    notes: list[str] = []
    for line in by_line(measured["rows"]):
        last, name = line[-1], _line_name(line[-1], measured)
        if last["steps"] is not None:
            sent = size_text(last["sent_bytes"])
            notes.append(f"{name}: the busiest rank sends {sent} in {last['steps']} steps for the last size")
        refused = next((row["refused"] for row in line if row["refused"] is not None), None)
        if refused is not None:
            notes.append(f"{name}: not supported: {refused}")
    notes += _strides_notes(measured["strides"])
    copy = measured["copy"]
    rate = f"{copy['bytes_per_second'] / 1e9:.3g} GB/s"
    notes.append(f"baseline: memory copy of {size_text(copy['num_bytes'])} on all ranks at once: {rate}")
    wrong = sum(row["num_wrong"] for row in measured["rows"])
    return [*notes, f"{wrong} wrong elements" if wrong else "all results correct"]


def _line_name(row: _Row, measured: _Row) -> str:
    """Return the name, with the backend if there are several."""
    return _name(row) if len(measured["world"]["backends"]) == 1 else f"{row['backend']} {_name(row)}"


def _cost_text(cost: _Row) -> str:
    latency, rate = f"{cost['latency_seconds'] * 1e6:,.1f} us", cost["bytes_per_second"]
    rate_text = f" + bytes / {rate / 1e9:.3g} GB/s" if rate is not None else ""
    return f"{latency}{rate_text} (median error {cost['median_error']:.0%}, largest {cost['largest_error']:.0%})"


def _strides_notes(rows: Sequence[_Row]) -> list[str]:
    """Return a line for each backend and memory layout: which operations are correct, wrong or refused."""
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['backend']}, {row['memory']} tensors", []).append(row)
    notes: list[str] = []
    for heading, group in groups.items():
        kinds: dict[str, list[str]] = {}
        for row in group:
            kinds.setdefault(_strides_text(row), []).append(row["operation"])
        notes.append(f"{heading}: " + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items()))
    return notes


def _strides_text(row: _Row) -> str:
    if row["refused"] is not None:
        return f"{'REFUSED' if row['is_failure'] else 'refused'} ({row['refused']})"
    if row["num_wrong"]:
        return "WRONG" if row["is_failure"] else "wrong, without an error"
    return "correct"
