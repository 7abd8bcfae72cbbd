"""Ranks that are forked from one process that has imported torch: their state, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyrank.errors import RankFailedError
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.launch.job import WORKER
from everyrank.launch.zygote import Zygote
from forkserver import MARK
from processes import Cli, wait_for_marked_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")

# the module with the function of the ranks; the fork server imports it too
MODULE = """\
import os
import sys

import torch

IMPORTED_BY = os.getpid()
STATEMENT


def rank_state(info):
    import random

    import numpy
    import psutil

    me = psutil.Process()
    return {
        "program": sys.modules["__main__"].__spec__.name,
        "imported by": IMPORTED_BY,
        "server": me.parent().ppid(),
        "session": os.getsid(0),
        "args": sys.argv[2:],
        "environment": {name: value for name, value in os.environ.items() if name != "PWD"},
        "stdin": os.path.realpath("/proc/self/fd/0"),
        "random": (random.random(), numpy.random.rand()),
        "folder": os.getcwd(),
        "sigterm handler": str(__import__("signal").getsignal(15)),
    }
"""


@pytest.fixture
def inspect_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that returns the state of two ranks. Their module runs `statement` at import."""

    def call(statement: str = "") -> list[dict[str, Any]]:
        name = f"rank_state_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(MODULE.replace("STATEMENT", statement))
        monkeypatch.syspath_prepend(tmp_path)
        return list(run_ranks(Launch(processes=2, timeout_seconds=120), f"{name}:rank_state").values())

    return call


def expected_equal_state(rank: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in each rank, with and without a fork server."""
    return {name: rank[name] for name in ("environment", "stdin", "folder", "sigterm handler")}


@pytest.mark.usefixtures("python")
def test_ranks_are_forks_of_one_process(inspect_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share imports and session, but no random state. Other state is the same as without a fork server."""
    monkeypatch.setenv("MINE", "of this call")
    ranks = inspect_ranks()
    assert [rank["args"] for rank in ranks] == [["0", "0", "2"], ["1", "1", "2"]]
    assert {rank["program"] for rank in ranks} == {"everyrank.launch.fork_server"}
    [server] = {rank["server"] for rank in ranks}
    assert {rank["imported by"] for rank in ranks} == {rank["session"] for rank in ranks} == {server}
    assert not psutil.pid_exists(server)
    random_numbers = {random_number for rank in ranks for random_number in rank["random"]}
    assert len(random_numbers) == 4
    monkeypatch.setattr(sys, "platform", "darwin")
    started_separately = inspect_ranks()
    assert all(rank["program"] == "everyrank.launch.worker" for rank in started_separately)
    for rank in ranks:
        assert expected_equal_state(rank) == expected_equal_state(started_separately[0])
        assert rank["environment"]["MINE"] == "of this call"


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    "statement",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
        "torch.cuda._is_in_bad_fork = lambda: True",
    ],
    ids=["a thread", "CUDA"],
)
def test_ranks_start_separately_if_a_fork_is_unsafe(inspect_ranks: Any, statement: str) -> None:
    """The imports started a thread or initialized CUDA, so each rank is a new process."""
    ranks = inspect_ranks(statement)
    assert all(rank["program"] == "everyrank.launch.worker" for rank in ranks)
    assert len({rank["server"] for rank in ranks}) == 1


@pytest.mark.usefixtures("python")
def test_ranks_report_a_failed_import(inspect_ranks: Any) -> None:
    """The ranks report the ImportError, as they would without a fork server."""
    with pytest.raises(RankFailedError, match=r"^rank \d of 2 .*rank_state_\w+\.py:7 .*ImportError: no GPU"):
        inspect_ranks("raise ImportError('no GPU')")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_killed_supervisor_or_server_is_reported(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """The error is one line with a rank and the signal. No process is left."""

    def kill_victim(info: RankInfo) -> None:
        supervisor = psutil.Process(os.getppid())
        if info.rank == 1:
            os.kill(supervisor.pid if victim == "supervisor" else supervisor.ppid(), signal.SIGKILL)
        signal.pause()

    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    rank_pattern = 1 if victim == "supervisor" else r"\d"
    with pytest.raises(RankFailedError, match=rf"^rank {rank_pattern} of 2 on .*: ended by SIGKILL") as error_info:
        run_ranks(Launch(processes=2, timeout_seconds=120), kill_victim)
    assert "\n" not in str(error_info.value).strip()
    monkeypatch.delenv(MARK)
    assert wait_for_marked_processes(mark) == {}


SCRIPT = """\
from everyrank.launch import Launch, run_ranks

print("the script", flush=True)


def rank(info):
    import torch

    return rank.__module__, torch.cuda.is_initialized(), torch.ones(2).sum().item()


print(run_ranks(Launch(processes=2), rank))
"""


def test_script_without_main_guard_runs_once(cli: Cli, tmp_path: Path) -> None:
    """Its main module is not run again in the ranks. The function is sent by value."""
    (tmp_path / "script.py").write_text(SCRIPT)
    running = cli.start(tmp_path, "script.py", command=(), is_forked=False)
    status, out, err = running.end()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["the script", str(dict.fromkeys(range(2), ("__main__", False, 2.0)))]
    assert running.remaining_processes() == {}


def test_zygote_starts_again_after_it_was_killed(tmp_path: Path) -> None:
    """The kernel may kill it for its memory between two tests of a suite."""
    zygote = Zygote([])
    try:
        for _ in range(2):
            without_job = zygote.start([*WORKER, str(tmp_path)], os.environ)
            assert without_job.wait(60.0) == 1
            assert zygote.process is not None
            zygote.process.kill()
            os.waitid(os.P_PID, zygote.process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        zygote.close()
