"""The pytest plugin: a separate pytest process runs a suite that uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from everyrank.errors import UsageError
from everyrank.launch.zygote import Zygote
from everyrank.pytest_plugin import Ranks
from launching import SRUN
from processes import rank_environment

FIRST_TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}

SUITE = """
import dataclasses
import time

import pytest
import torch
import torch.distributed as dist


@dataclasses.dataclass
class Pair:
    left: int
    right: int


def mean(value):
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def test_results_by_rank(ranks):
    assert ranks(4, backend="gloo").run(mean, 3.0) == [4.5] * 4
    assert ranks(2, backend="shm").run(mean, value=3.0) == [3.5] * 2
    factor = 10
    assert ranks(2, backend=None).run(lambda: factor) == [10, 10]
    assert ranks(2, backend=None).run(Pair, 1, right=2) == [Pair(1, 2)] * 2


def test_unpicklable_result(ranks):
    ranks(2, backend=None).run(lambda: (number for number in [1]))


@pytest.mark.ranks(3, backend="shm")
def test_settings_of_the_marker(ranks):
    assert ranks.run(mean, 0.0) == [1.0] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 2])
def test_on_each_rank(count, tmp_path):
    value = torch.ones(count)
    dist.all_reduce(value)
    assert value.sum() == 2 * count
    (tmp_path / str(dist.get_rank())).touch()


@pytest.mark.ranks(2)
def test_wrong():
    print("output of rank", dist.get_rank())
    assert dist.get_rank() == 0  # wrong


@pytest.mark.ranks(2, timeout=2)
def test_hang():
    if dist.get_rank() == 0:
        dist.barrier()  # waits
    time.sleep(100)  # cause


@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("not on this machine")


@pytest.mark.ranks(2)
def test_unpicklable(capsys):
    pass


@pytest.mark.ranks(2, backend="smoke")
def test_unknown_backend():
    pass


@pytest.mark.ranks("two")
def test_wrong_number():
    pass


@pytest.mark.ranks(2, speed=3)
def test_unknown_setting():
    pass


@pytest.mark.ranks(2)
def test_after_all_that():
    assert dist.get_world_size() == 2
"""


def line_of(mark: str) -> int:
    """Return the number of the line of SUITE that ends with this comment."""
    return next(number for number, line in enumerate(SUITE.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of pytest for SUITE."""
    folder: Path = tmp_path_factory.mktemp("suite")
    (folder / "test_own.py").write_text(SUITE)
    plugin = ["-p", "everyrank.pytest_plugin"] if "everyrank" not in _entry_points() else []
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-v", "--strict-markers", "test_own.py"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not list(folder.glob("everyrank-*")), "a folder of the ranks was left"
    return process.stdout + process.stderr


def _entry_points() -> set[str]:
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group="pytest11")}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("test_results_by_rank", "PASSED"),
        ("test_unpicklable_result", "FAILED"),
        ("test_settings_of_the_marker", "PASSED"),
        (r"test_on_each_rank\[1\]", "PASSED"),
        (r"test_on_each_rank\[2\]", "PASSED"),
        ("test_wrong", "FAILED"),
        ("test_hang", "FAILED"),
        ("test_skip", "SKIPPED"),
        ("test_unpicklable", "FAILED"),
        ("test_unknown_backend", "FAILED"),
        ("test_wrong_number", "FAILED"),
        ("test_unknown_setting", "FAILED"),
        ("test_after_all_that", "PASSED"),
    ],
)
def test_failures_and_skips_of_ranks_are_those_of_the_test(suite: str, name: str, outcome: str) -> None:
    """A failure or skip on a rank is the outcome of the test. Later tests are not affected."""
    assert re.search(rf"::{name} {outcome}", suite), suite


@pytest.mark.parametrize(
    "message",
    [
        f"test_own.py:{line_of('wrong')} in test_wrong: AssertionError: assert 1 == 0",
        "output of rank 1",
        "output of rank 0",
        "the ranks did not end within 2 s: ",
        "rank 1 never reached barrier, collective 1",
        f"test_own.py:{line_of('cause')} in test_hang",
        f"waits in it, at test_own.py:{line_of('waits')} in test_hang",
        "cannot be sent to the ranks",
        "<lambda>: its result cannot be sent from the ranks (TypeError: cannot pickle 'generator' object)",
        "backend='smoke': give gloo, shm, nccl",
        "@pytest.mark.ranks('two'): give a number of processes",
        "'speed'; give (processes, backend=..., timeout=...)",
    ],
)
def test_failure_messages_have_cause_line_and_output(suite: str, message: str) -> None:
    """The messages have the cause with its line, the output of the ranks, and an explanation of a hang."""
    assert message in suite


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        (rank_environment(0, "29500", 1), "start pytest without a launcher"),
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"} | FIRST_TASK, "unset SLURM_STEP_ID"),
    ],
)
def test_pytest_under_a_launcher_does_not_pass_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], hint: str
) -> None:
    """In a shell of `srun --pty`, or under torchrun, this process is a rank, and two ranks cannot be started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    zygote = Zygote(())
    with pytest.raises(UsageError, match=f"this pytest is rank 0 of 1.*{hint}"):
        Ranks(zygote, 2, backend=None).run(lambda: None)
    assert os.environ == before
    assert zygote.process is None
