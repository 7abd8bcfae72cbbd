"""The generated parts of README and docs are up to date with the Records and the code."""

from __future__ import annotations

import functools
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGES = (
    "README.md",
    "README.zh.md",
    "docs/code-structure.md",
    "docs/api.md",
    "docs/recipes.md",
    "docs/which-layout.md",
    "docs/benchmarks.md",
    "docs/performance.md",
    "docs/any-script.md",
    "docs/port.md",
    "docs/port-targets.md",
    "docs/collectives.md",
    "docs/backends.md",
    "docs/gpu.md",
    "docs/zh/gpu.md",
    "docs/zh/which-layout.md",
    "docs/zh/performance.md",
    "docs/zh/backends.md",
    "docs/zh/collectives.md",
    "docs/zh/silent-bugs.md",
    "docs/zh/recipes.md",
    "docs/zh/code-structure.md",
    "docs/zh/benchmarks.md",
    "docs/zh/api.md",
    "docs/zh/any-script.md",
    "docs/zh/port.md",
    "docs/zh/port-targets.md",
)


@pytest.fixture(scope="module")
def generate(repository: Path) -> Callable[[list[str]], int]:
    """`main` of docs/generate.py. Each part of the pages is generated only once for all tests of this file."""
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    generator = runpy.run_path(str(repository / "docs" / "generate.py"))
    for parts in generator["PARTS"].values():
        parts.update({name: (source, functools.cache(make)) for name, (source, make) in parts.items()})
    return generator["main"]


def test_generated_parts_are_up_to_date(
    generate: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (generate(["--check"]), capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize(
    ("page", "old", "new", "line"),
    [
        (
            "README.md",
            "| digits | `ddp` | equal | ",
            "| digits | `ddp` | equal | 9",
            "benchmarks/records/text-demo-cpu",
        ),
        (
            "docs/performance.md",
            "| ddp | 0.",
            "| ddp | 9.",
            "benchmarks/records/dig",
        ),
        ("README.zh.md", "| 20 ", "| 30 ", "benchmarks/records/text-demo-cpu"),
        ("README.md", "<!-- generated: the checks", "<!-- generate: the checks", "give"),
        (
            "docs/code-structure.md",
            "  record.py ",
            "  records.py ",
            "src/everyrank gives; run: python",
        ),
        (
            "docs/code-structure.md",
            "| `zero1` |",
            "| `zero2` |",
            '"strategies" is not what src/everyrank/strategies gives',
        ),
        (
            "docs/code-structure.md",
            "| `spawn` |",
            "| `spawned` |",
            '"launchers" is not what src/everyrank/launch gives',
        ),
        (
            "docs/collectives.md",
            "| ring | 2, 64 MiB",
            "| ring | 2, 65 MiB",
            "src/everyrank/collectives/algorithms gives",
        ),
        (
            "docs/code-structure.md",
            "<!-- end -->",
            "",
            '"<!-- generated: the code structure -->" once',
        ),
    ],
)
def test_changed_page_is_detected(
    generate: Callable[[list[str]], int],
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    page: str,
    old: str,
    new: str,
    line: str,
) -> None:
    """The error names the page, the part, its source and the command. The command repairs everything except markers."""
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    text = (tmp_path / page).read_text()
    assert old in text
    (tmp_path / page).write_text(text.replace(old, new, 1))
    assert generate(["--check", "--pages", str(tmp_path)]) == 1
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{page}: ")
    assert line in error
    can_be_repaired = "<!--" not in old
    assert generate(["--pages", str(tmp_path)]) == (0 if can_be_repaired else 1)
    assert ((tmp_path / page).read_text() == text) == can_be_repaired


def collective(operation: str, backend: str, seconds: float, **values: Any) -> dict[str, Any]:
    """Return a row of the results of benchmarks/collectives.py."""
    row = {"operation": operation, "backend": backend, "algorithm": None, "ranks": 2, "num_bytes": 4, "refused": None}
    row |= {"p50_seconds": seconds, "num_wrong": 0, "mean_speedup": None, "p50_speedup": None}
    line = {"latency_seconds": seconds, "bytes_per_second": 2e9, "median_error": 0.01, "largest_error": 0.5}
    return {**row, **line, **values}


def test_tables_of_the_collectives(repository: Path, tmp_path: Path) -> None:
    """The pages show the results of benchmarks/collectives.py. Without results, they say `Not measured yet`."""
    generator = runpy.run_path(str(repository / "docs" / "generate.py"))
    generator_globals = generator["main"].__globals__
    generator_globals["ROOT"], generator_globals["COLLECTIVES"] = tmp_path, tmp_path / "c.json"
    parts = [
        generator[name]
        for name in ("measured_algorithms", "measured_backends", "two_backends_alone", "what_backends_carry")
    ]
    assert all("Not measured yet" in part() for part in parts)
    rows = [
        collective("all_reduce", "gloo", 1e-3),
        collective("all_reduce", "gloo", 2e-3, algorithm="ring"),
        collective("all_reduce", "shm", 5e-5, mean_speedup=20.0, p50_speedup=15.0),
        collective("send", "gloo", 1e-4),
        collective("send", "shm", 1e-4, refused="not here"),
    ]
    starts = [collective("all_reduce", "gloo", 1e-3, mean_seconds=mean) for mean in (1e-3, 2e-3, 4e-3)]
    starts += [
        collective("all_reduce", "shm", 5e-5, mean_speedup=ratio, p50_speedup=10.0, mean_seconds=1e-4)
        for ratio in (40.0, 10.0, 20.0)
    ]
    provenance = {"processor": "P", "cores": 2, "torch": "2", "date": "2026-11-22T00"}
    (tmp_path / "c.json").write_text(
        json.dumps({"rows": rows, "costs": rows, "starts": starts, "provenance": provenance})
    )
    algorithms, backends, alone, carried = (part() for part in parts)
    assert "| 2 | gloo's own | 1,000 |" in algorithms
    assert "| 2 | ring | 2,000 |" in algorithms
    assert "| all_reduce | shm | 50.0 us + bytes / 2 GB/s | 1%, 50% | 20.0, 15.0 |" in backends
    assert backends.index("| send |") < backends.index("| all_reduce |")
    assert "| send | yes | no: not here |" in carried
    assert all("P, 2 cores, torch 2, 2026-11-22" in text for text in (algorithms, backends, alone, carried))
    assert "| gloo, us | shm, us |" in alone
    assert "| 4 B | 2,000 | 100 | 20.0 (10.0 to 40.0) | 10.0 (10.0 to 10.0) |" in alone
