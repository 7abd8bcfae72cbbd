"""What `everyrank comm` has measured: a table, and JSON with the fitted costs."""

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
_ARM = ("backend", "algorithm")
_LINE = ("backend", "operation", "algorithm", "reduction", "dtype", "is_async", "ranks")
_Row = Mapping[str, Any]


def comm_json(results: _Row, words: Sequence[str]) -> dict[str, Any]:
    """What planning reads: `costs`, and the `rows` that they are fitted to; docs/collectives.md has the schema.

    `found` is what a rank has measured (`collectives.rank.comm_rank`).
    """
    costs: list[dict[str, Any]] = []
    for rows in by_line(results["rows"]):
        cost = _cost(rows)
        if cost is not None:
            fitted = {key: None if value == float("inf") else value for key, value in dataclasses.asdict(cost).items()}
            sizes = [row["num_bytes"] for row in rows if row["p50_seconds"] is not None]
            covers = {"least_bytes": min(sizes), "most_bytes": max(sizes)}
            costs.append({"name": _name(rows[0]), **{key: rows[0][key] for key in _LINE}, **fitted, **covers})
    return {
        "schema": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["everyrank", *words],
        "everyrank": __version__,
        "world": results["world"],
        "machine": results["machine"],
        "rows": results["rows"],
        "costs": costs,
        "copy": results["copy"],
        "strides": results["strides"],
    }


def has_failed(measured: _Row) -> bool:
    """Whether an element was wrong where it had to be right."""
    return any(row["num_wrong"] for row in measured["rows"]) or any(row["is_failure"] for row in measured["strides"])


def print_comm(measured: _Row) -> None:
    """A table with the sizes of each operation; below it the line that fits the times of each, and what is wrong."""
    if measured["rows"]:
        print_table(comm_title(measured), comm_table(measured), [*cost_notes(measured), *comm_notes(measured)])


def comm_title(measured: _Row) -> str:
    """What stands over the table."""
    first, world = measured["rows"][0], measured["world"]
    heading = f"{', '.join(world['backends'])}, {world['size']} ranks on {world['device']}, {first['dtype']}"
    return f"{heading}, in groups of {first['ranks']}" if first["ranks"] != world["size"] else heading


def comm_table(measured: _Row, repeats: bool = False) -> Table:
    """A row for each operation and size; where several backends or algorithms take turns one for each of these.

    A name that the row above has, too, is left out unless it `repeats`.
    """
    rows = measured["rows"]
    candidates = list(dict.fromkeys(map(candidate_name, rows)))
    header = list(_HEADER)
    if len(candidates) < 2:
        shown, named = [[_name(row), _size(row), *_cells(row)] for row in rows], 1
    else:
        shown = [
            [_name(row, with_candidate=False), _size(row), candidate_name(row), *_cells(row), *_speedups(row)]
            for row in rows
        ]
        header, named = [*_HEADER[:2], "by", *_HEADER[2:], f"x {candidates[0]}: mean", "p50"], 2
    if not repeats:
        shown = [_without_repeats(row, last, named) for row, last in _with_last(shown)]
    return Table(header, shown, [])


def _with_last(rows: Sequence[list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Each row with the one above it."""
    return zip(rows, [[], *rows[:-1]] if rows else [], strict=True)


def _without_repeats(row: list[str], last: list[str], count: int) -> list[str]:
    """The row; of the first cells those stay empty that say the same as the row above."""
    same = next((index for index in range(count) if row[: index + 1] != last[: index + 1]), count)
    return [""] * same + row[same:]


def _size(row: _Row) -> str:
    return size_text(row["num_bytes"]) if row["num_bytes"] else "-"


def _speedups(row: _Row) -> list[str]:
    values = (row["mean_speedup"], row["p50_speedup"])
    return ["" if value is None else f"{value:.2f}" for value in values]


def _cells(row: _Row) -> list[str]:
    if row["refused"] is not None:
        return ["not offered", "", "", "", "", "0", ""]
    times = [f"{row[key] * 1e6:,.1f}" for key in ("mean_seconds", "p50_seconds", "p99_seconds")]
    rates = ["-" if row[key] is None else f"{row[key] / 1e9:.3g}" for key in ("algorithm_bandwidth", "bus_bandwidth")]
    return [*times, *rates, str(row["calls"]), str(row["num_wrong"])]


def candidate_name(row: _Row) -> str:
    """`gloo`, or `gloo ring` for an algorithm over it: what takes turns with others."""
    return " ".join(row[key] for key in _ARM if row[key])


def _name(row: _Row, with_candidate: bool = True) -> str:
    parts = [row["operation"], row["reduction"] if row["reduction"] not in (None, "sum") else ""]
    parts += [row["algorithm"] or "" if with_candidate else "", "async" if row["is_async"] else ""]
    return " ".join(filter(None, parts))


def by_line(rows: Sequence[_Row]) -> list[list[_Row]]:
    """The sizes of each operation on each backend, by each algorithm: what a line is fitted to, and drawn through."""
    lines: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in _LINE), []).append(row)
    return list(lines.values())


def _cost(rows: Sequence[_Row]) -> Cost | None:
    """Fitted to the median times of one operation; None where there are fewer than three sizes."""
    known = [row for row in rows if row["p50_seconds"] is not None and row["num_bytes"]]
    if len(known) < 3:
        return None
    return fit_cost([row["num_bytes"] for row in known], [row["p50_seconds"] for row in known])


def comm_cost_table(measured: _Row) -> Table:
    """A row for each line that was fitted."""
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
    """The same, each as a sentence."""
    return [f"{_line_name(cost, measured)}: {_cost_text(cost)}" for cost in measured["costs"]]


def comm_notes(measured: _Row) -> list[str]:
    """What an algorithm sends, what is not offered, tensors that are not contiguous; last, how many are wrong."""
    notes: list[str] = []
    for line in by_line(measured["rows"]):
        last, name = line[-1], _line_name(line[-1], measured)
        if last["steps"] is not None:
            sent = size_text(last["sent_bytes"])
            notes.append(f"{name}: the busiest rank sends {sent} in {last['steps']} steps for the last size")
        refused = next((row["refused"] for row in line if row["refused"] is not None), None)
        if refused is not None:
            notes.append(f"{name}: not offered: {refused}")
    notes += _strides_notes(measured["strides"])
    copy = measured["copy"]
    rate = f"{copy['bytes_per_second'] / 1e9:.3g} GB/s"
    notes.append(f"a plain copy of {size_text(copy['num_bytes'])} on every rank at once: {rate}")
    wrong = sum(row["num_wrong"] for row in measured["rows"])
    return [*notes, f"{wrong} wrong elements" if wrong else "no wrong element"]


def _line_name(row: _Row, measured: _Row) -> str:
    """With the backend, where there are several."""
    return _name(row) if len(measured["world"]["backends"]) == 1 else f"{row['backend']} {_name(row)}"


def _cost_text(cost: _Row) -> str:
    latency, rate = f"{cost['latency_seconds'] * 1e6:,.1f} us", cost["bytes_per_second"]
    rate_text = f" + bytes / {rate / 1e9:.3g} GB/s" if rate is not None else ""
    return f"{latency}{rate_text} (median error {cost['median_error']:.0%}, largest {cost['largest_error']:.0%})"


def _strides_notes(rows: Sequence[_Row]) -> list[str]:
    """One line for each backend and way of lying in memory: which operations are right, wrong, refused."""
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
        return "WRONG" if row["is_failure"] else "wrong without a word"
    return "right"
