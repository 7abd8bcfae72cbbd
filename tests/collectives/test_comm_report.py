"""What `everyrank comm` says of its numbers: a table, JSON with the fitted costs, a page that loads nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from everyrank.report.comm import comm_json, comm_notes, comm_table, comm_title, has_failed
from everyrank.report.comm_page import comm_page

EVIL = "<script>alert(1)</script>"


def row(backend: str, num_bytes: int, seconds: float | None, algorithm: str | None = None, **values: Any) -> Any:
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


def strides(operation: str, num_wrong: int = 0, refused: str | None = None, is_failure: bool = False) -> Any:
    return {
        "backend": "gloo",
        "operation": operation,
        "memory": "strided",
        "refused": refused,
        "num_wrong": num_wrong,
        "is_failure": is_failure,
    }


def measured(rows: list[Any], of_strides: list[Any] | None = None) -> dict[str, Any]:
    """As a rank gives it: gloo takes 100 us and 1 GB/s, shm 10 us and 4 GB/s."""
    backends = list(dict.fromkeys(one["backend"] for one in rows))
    world = {"size": 2, "device": "cpu", "backends": backends}
    found = {"rows": rows, "strides": of_strides or [], "world": world, "machine": {"torch": "2", "processor": EVIL}}
    found["copy"] = {"num_bytes": 2**24, "bytes_per_second": 5e9}
    return comm_json(found, ["comm", EVIL])


def two_backends() -> list[Any]:
    rows = []
    for size in (4, 1024, 2**20, 2**24):
        rows += [
            row("gloo", size, 1e-4 + size / 1e9),
            row("shm", size, 1e-5 + size / 4e9, mean_speedup=9.5, p50_speedup=9.75),
            row("mpi", size, None, refused=EVIL),
        ]
    return rows


def test_costs_of_each_backend() -> None:
    """What the times were made of comes back, for each backend that offers the operation, with the sizes it covers."""
    found = measured(two_backends())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    gloo, shm = found["costs"]
    assert (gloo["backend"], shm["backend"]) == ("gloo", "shm")
    assert (gloo["latency_seconds"], gloo["bytes_per_second"]) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert (shm["latency_seconds"], shm["bytes_per_second"]) == (pytest.approx(1e-5), pytest.approx(4e9))
    assert (shm["least_bytes"], shm["most_bytes"]) == (4, 2**24)
    assert found["machine"]["torch"] == "2"


def test_the_schema_is_the_documented_one(repository: Path) -> None:
    """Every key of the JSON stands in docs/collectives.md."""
    text = (repository / "docs" / "collectives.md").read_text()
    found = measured(two_backends(), [strides("send")])
    keys = {*found, *found["world"], *found["copy"], *found["rows"][0], *found["costs"][0], *found["strides"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_table_of_several() -> None:
    """A row for each backend, with how many times as fast as the first it is; one backend alone has no such columns."""
    found = measured(two_backends())
    assert comm_title(found).split(", ") == ["gloo", "shm", "mpi", "2 ranks on cpu", "float32"]
    table = comm_table(found)
    assert table.header[2] == "by"
    assert table.header[-2:] == ["x gloo: mean", "p50"]
    first, second, third, fourth = table.rows[:4]
    assert (first[:3], first[-2:]) == (["all_reduce", "4 B", "gloo"], ["", ""])
    assert (second[:3], second[-2:]) == (["", "", "shm"], ["9.50", "9.75"])
    assert third[2:4] == ["mpi", "not supported"]
    assert comm_notes(found).count(f"mpi all_reduce: not supported: {EVIL}") == 1
    assert fourth[:3] == ["", "1 KiB", "gloo"]
    assert {len(cells) for cells in table.rows} == {len(table.header)}
    alone = comm_table(measured([row("gloo", 4, 1e-4), row("gloo", 16, 1e-4)]))
    assert [cells[:2] for cells in alone.rows] == [["all_reduce", "4 B"], ["", "16 B"]]
    assert {len(cells) for cells in alone.rows} == {len(alone.header)} == {9}
    assert [cells[:3] for cells in comm_table(found, repeats=True).rows[:2]] == [
        ["all_reduce", "4 B", "gloo"],
        ["all_reduce", "4 B", "shm"],
    ]


def test_tensors_that_are_not_contiguous() -> None:
    """What gloo gets wrong is said; what a backend gets wrong that says it takes them is a failure."""
    said = [strides("gather"), strides("all_reduce", 3), strides("send", refused="no"), strides("isend", refused="no")]
    found = measured([row("gloo", 4, 1e-4)], said)
    [line] = [note for note in comm_notes(found) if note.startswith("gloo, strided tensors: ")]
    assert re.search(r"correct: gather; wrong.*: all_reduce; refused \(no\): send, isend", line)
    assert not has_failed(found)
    failed = measured([row("gloo", 4, 1e-4)], [strides("all_reduce", 3, is_failure=True)])
    assert "gloo, strided tensors: WRONG: all_reduce" in comm_notes(failed)
    assert any("memory copy of 16 MiB" in note and "5 GB/s" in note for note in comm_notes(failed))
    assert has_failed(failed)
    assert has_failed(measured([row("gloo", 4, 1e-4, num_wrong=1)]))


def test_page() -> None:
    """One drawing for the operation, with a line for each backend that has times; nothing is loaded, all is escaped."""
    text = comm_page(measured(two_backends()))
    [svg] = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert re.findall(r">(gloo|shm|mpi)</text>", svg) == ["gloo", "shm"]
    assert "mathdefault" not in svg
    assert "<script" not in text
    assert html.escape(EVIL) in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", text.replace("xlink:href", "href"))
    assert "all results correct" in text
    assert '<td data-name="latency us">100.0</td>' in text
    assert text.count('<td data-name="by">shm</td>') == 5  # a line, and four sizes


def test_page_of_one_size() -> None:
    """There is nothing to be drawn through one point, and of no row there is no table."""
    assert "<svg" not in comm_page(measured([row("gloo", 4, 1e-4)]))
    assert "nothing was measured" in comm_page(measured([]))
