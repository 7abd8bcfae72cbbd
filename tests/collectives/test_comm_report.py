"""Output of `everyrank comm`: a table, JSON with fitted costs, and a page that loads nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from everyrank.report.comm import comm_json, comm_notes, comm_table, comm_title, has_failed
from everyrank.report.comm_page import comm_page

SCRIPT_TAG = "<script>alert(1)</script>"


def row(backend: str, num_bytes: int, seconds: float | None, algorithm: str | None = None, **values: Any) -> Any:
    """Return a row of the measurements as JSON."""
    return {
        "backend": backend,
        "operation": "all_reduce",
        "algorithm": algorithm,
        "reduction": "sum",
        "dtype": "float32",
        "is_async": False,
        "ranks": 2,
        "num_bytes": num_bytes,
        "calls": 7 if seconds else 0,
        "mean_seconds": seconds,
        "p50_seconds": seconds,
        "p99_seconds": seconds,
        "mean_speedup": None,
        "p50_speedup": None,
        "algorithm_bandwidth": None,
        "bus_bandwidth": None,
        "num_wrong": 0,
        "steps": None,
        "sent_bytes": None,
        "refused": None,
        **values,
    }


def stride_row(operation: str, num_wrong: int = 0, refused: str | None = None, is_failure: bool = False) -> Any:
    """Return a row of the stride check as JSON."""
    return {
        "backend": "gloo",
        "operation": operation,
        "memory": "strided",
        "refused": refused,
        "num_wrong": num_wrong,
        "is_failure": is_failure,
    }


def report_of(rows: list[Any], stride_rows: list[Any] | None = None) -> dict[str, Any]:
    """Return the report of these rows, with the JSON keys of `everyrank comm`."""
    backends = list(dict.fromkeys(row_json["backend"] for row_json in rows))
    world = {"size": 2, "device": "cpu", "backends": backends}
    results = {
        "rows": rows,
        "strides": stride_rows or [],
        "world": world,
        "machine": {"torch": "2", "processor": SCRIPT_TAG},
    }
    results["copy"] = {"num_bytes": 2**24, "bytes_per_second": 5e9}
    return comm_json(results, ["comm", SCRIPT_TAG])


def rows_of_three_backends() -> list[Any]:
    """Return rows of gloo, shm and mpi.

    gloo has 100 us and 1 GB/s, shm has 10 us and 4 GB/s, and mpi is refused.
    """
    rows = []
    for size in (4, 1024, 2**20, 2**24):
        rows += [
            row("gloo", size, 1e-4 + size / 1e9),
            row("shm", size, 1e-5 + size / 4e9, mean_speedup=9.5, p50_speedup=9.75),
            row("mpi", size, None, refused=SCRIPT_TAG),
        ]
    return rows


def test_costs_are_fitted_for_each_backend() -> None:
    """The fit recovers latency and bandwidth of each backend that supports the operation, with the range of sizes."""
    report = report_of(rows_of_three_backends())
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    gloo, shm = report["costs"]
    assert (gloo["backend"], shm["backend"]) == ("gloo", "shm")
    assert (gloo["latency_seconds"], gloo["bytes_per_second"]) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert (shm["latency_seconds"], shm["bytes_per_second"]) == (pytest.approx(1e-5), pytest.approx(4e9))
    assert (shm["least_bytes"], shm["most_bytes"]) == (4, 2**24)
    assert report["machine"]["torch"] == "2"


def test_json_keys_are_documented(repository: Path) -> None:
    """Every key of the JSON is in docs/collectives.md."""
    text = (repository / "docs" / "collectives.md").read_text()
    report = report_of(rows_of_three_backends(), [stride_row("send")])
    keys = {*report, *report["world"], *report["copy"], *report["rows"][0], *report["costs"][0], *report["strides"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_table_has_a_row_and_a_speedup_for_each_backend() -> None:
    """The speedup is relative to the first backend. With one backend the table has no such columns."""
    report = report_of(rows_of_three_backends())
    assert comm_title(report).split(", ") == ["gloo", "shm", "mpi", "2 ranks on cpu", "float32"]
    table = comm_table(report)
    assert table.header[2] == "by"
    assert table.header[-2:] == ["x gloo: mean", "p50"]
    first, second, third, fourth = table.rows[:4]
    assert (first[:3], first[-2:]) == (["all_reduce", "4 B", "gloo"], ["", ""])
    assert (second[:3], second[-2:]) == (["", "", "shm"], ["9.50", "9.75"])
    assert third[2:4] == ["mpi", "not supported"]
    assert comm_notes(report).count(f"mpi all_reduce: not supported: {SCRIPT_TAG}") == 1
    assert fourth[:3] == ["", "1 KiB", "gloo"]
    assert {len(cells) for cells in table.rows} == {len(table.header)}
    single_backend_table = comm_table(report_of([row("gloo", 4, 1e-4), row("gloo", 16, 1e-4)]))
    assert [cells[:2] for cells in single_backend_table.rows] == [["all_reduce", "4 B"], ["", "16 B"]]
    assert {len(cells) for cells in single_backend_table.rows} == {len(single_backend_table.header)} == {9}
    assert [cells[:3] for cells in comm_table(report, repeats=True).rows[:2]] == [
        ["all_reduce", "4 B", "gloo"],
        ["all_reduce", "4 B", "shm"],
    ]


def test_wrong_results_of_strided_tensors_are_noted() -> None:
    """For gloo they are a note. They are a failure for a backend that claims to support strided tensors."""
    stride_rows = [
        stride_row("gather"),
        stride_row("all_reduce", 3),
        stride_row("send", refused="no"),
        stride_row("isend", refused="no"),
    ]
    report = report_of([row("gloo", 4, 1e-4)], stride_rows)
    [line] = [note for note in comm_notes(report) if note.startswith("gloo, strided tensors: ")]
    assert re.search(r"correct: gather; wrong.*: all_reduce; refused \(no\): send, isend", line)
    assert not has_failed(report)
    failed_report = report_of([row("gloo", 4, 1e-4)], [stride_row("all_reduce", 3, is_failure=True)])
    assert "gloo, strided tensors: WRONG: all_reduce" in comm_notes(failed_report)
    assert any("memory copy of 16 MiB" in note and "5 GB/s" in note for note in comm_notes(failed_report))
    assert has_failed(failed_report)
    assert has_failed(report_of([row("gloo", 4, 1e-4, num_wrong=1)]))


def test_page_has_one_chart_and_loads_nothing() -> None:
    """The chart has a line for each backend with times, and all text is escaped."""
    text = comm_page(report_of(rows_of_three_backends()))
    [svg] = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert re.findall(r">(gloo|shm|mpi)</text>", svg) == ["gloo", "shm"]
    assert "mathdefault" not in svg
    assert "<script" not in text
    assert html.escape(SCRIPT_TAG) in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", text.replace("xlink:href", "href"))
    assert "all results correct" in text
    assert '<td data-name="latency us">100.0</td>' in text
    assert text.count('<td data-name="by">shm</td>') == 5  # a line, and four sizes


def test_page_has_no_chart_for_one_size() -> None:
    """Without any row, it has no table either."""
    assert "<svg" not in comm_page(report_of([row("gloo", 4, 1e-4)]))
    assert "nothing was measured" in comm_page(report_of([]))
