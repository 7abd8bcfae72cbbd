"""The benchmarks run, and the loops that they compare do the same arithmetic.

The fork server starts the benchmarks that measure no times, and their processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everyrank import read_records
from everyrank.record import Record
from forkserver import ForkServer


def measured(repository: Path, tmp_path: Path, *words: str) -> list[Record]:
    """Return the Records of a short run of benchmarks/overhead.py, without the arms that need other tools."""
    out = tmp_path / "records.json"
    script = repository / "benchmarks" / "overhead.py"
    done = subprocess.run(
        [sys.executable, script, *words, "--arms", "everyrank", "--rounds", "2", "--json", out],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_records(out)


@pytest.mark.parametrize(("name", "ranks"), [("digits", 2), ("one", 1)])
def test_overhead_benchmark_compares_loops_with_equal_losses(
    repository: Path, tmp_path: Path, name: str, ranks: int
) -> None:
    """A comparison of speeds is meaningless if the two loops train different models."""
    hand, own = measured(repository, tmp_path, name)
    assert [one.provenance["overhead"]["loop"] for one in (hand, own)] == ["hand-written", "everyrank"]
    assert hand.world_size == own.world_size == ranks
    assert own.provenance["overhead"]["losses_compared"] == 20
    assert own.loss == pytest.approx(hand.loss, rel=1e-5)
    assert own.step_seconds is not None
    assert own.step_seconds.trials == 2
    assert own.provenance["overhead"]["ratio_to_hand_written"]["median"] > 0


def test_guard_cost_is_a_share_of_the_update(repository: Path, tmp_path: Path) -> None:
    """Each arm has a share, which is positive."""
    out = tmp_path / "records.json"
    command = [sys.executable, repository / "benchmarks" / "guard_cost.py", "--rounds", "2", "--every", "2"]
    done = subprocess.run([*command, "--json", out], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert all(0 < row.provenance["guard"]["share"]["median"] < 5 for row in read_records(out))


def test_chaos_benchmark_with_faults_is_bitwise_equal(python: ForkServer, repository: Path, tmp_path: Path) -> None:
    """Three faults are injected one after another."""
    out = tmp_path / "records.json"
    script = repository / "benchmarks" / "chaos.py"
    command = [python.programs / "python", script, "--injections", "3", "--processes", "2"]
    words = ["--layout", "fsdp", "--json", out]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    [record] = read_records(out)
    assert record.parity.bitwise
    assert record.provenance["long_run"]["wrong"] == []
    assert record.provenance["long_run"]["left"] == 0


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline"])
def test_traced_memory_is_close_to_the_memory_of_real_ranks(
    python: ForkServer, repository: Path, tmp_path: Path, layout: str
) -> None:
    """The error is below 0.5% on each rank. A Record has the larger table."""
    out = tmp_path / "memory.json"
    command = [python.programs / "python", repository / "benchmarks" / "plan_memory.py", "--layout", layout]
    command += ["--updates", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(abs(row["error"]) < 0.005 for row in rows)


def test_committed_records_can_be_read(repository: Path) -> None:
    """The numbers in README and docs come from these files."""
    files = sorted((repository / "benchmarks" / "records").glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        if isinstance(found, dict):  # of audits: no trainings
            assert found["rows"]
            assert {"torch", "cores", "date"} <= found["provenance"].keys()
        else:
            assert read_records(file)
