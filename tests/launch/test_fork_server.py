"""Ranks that are forked from one process that has imported torch: what each of them is, and how they end."""

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
from forkserver import MARK
from processes import Cli, left_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank starts by itself")

# what a rank finds; imported by the fork server, too
MODULE = """\
import os
import sys

import torch

IMPORTED_BY = os.getpid()
BEFORE


def look(info):
    import random

    import numpy
    import psutil

    me = psutil.Process()
    return {
        "program": sys.modules["__main__"].__spec__.name,
        "imported by": IMPORTED_BY,
        "server": me.parent().ppid(),
        "session": os.getsid(0),
        "words": sys.argv[2:],
        "environment": {name: value for name, value in os.environ.items() if name != "PWD"},
        "stdin": os.path.realpath("/proc/self/fd/0"),
        "random": (random.random(), numpy.random.rand()),
        "folder": os.getcwd(),
        "signals": str(__import__("signal").getsignal(15)),
    }
"""


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`looked(before)`: what each of two ranks finds in itself, when the module they import does this first."""

    def call(before: str = "") -> list[dict[str, Any]]:
        name = f"looks_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(MODULE.replace("BEFORE", before))
        monkeypatch.syspath_prepend(tmp_path)
        return list(run_ranks(Launch(processes=2, timeout_seconds=120), f"{name}:look").values())

    return call


def alike(rank: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in each rank, however it was started."""
    return {name: rank[name] for name in ("environment", "stdin", "folder", "signals")}


@pytest.mark.usefixtures("python")
def test_ranks_are_forks_of_one_process(looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share its imports and its session, and nothing that is random; else they are as where each starts alone."""
    monkeypatch.setenv("MINE", "of this call")
    ranks = looked()
    assert [rank["words"] for rank in ranks] == [["0", "0", "2"], ["1", "1", "2"]]
    assert {rank["program"] for rank in ranks} == {"everyrank.launch.fork_server"}
    [server] = {rank["server"] for rank in ranks}
    assert {rank["imported by"] for rank in ranks} == {rank["session"] for rank in ranks} == {server}
    assert not psutil.pid_exists(server)
    numbers = {number for rank in ranks for number in rank["random"]}
    assert len(numbers) == 4
    monkeypatch.setattr(sys, "platform", "darwin")
    alone = looked()
    assert all(rank["program"] == "everyrank.launch.worker" for rank in alone)
    for rank in ranks:
        assert alike(rank) == alike(alone[0])
        assert rank["environment"]["MINE"] == "of this call"


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    "before",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
        "torch.cuda._is_in_bad_fork = lambda: True",
    ],
    ids=["a thread", "CUDA"],
)
def test_what_no_fork_can_use(looked: Any, before: str) -> None:
    """The imports have left threads, or have asked the driver something: each rank is a process of its own."""
    ranks = looked(before)
    assert all(rank["program"] == "everyrank.launch.worker" for rank in ranks)
    assert len({rank["server"] for rank in ranks}) == 1


@pytest.mark.usefixtures("python")
def test_an_import_that_fails(looked: Any) -> None:
    """The ranks say it, as they would without a fork server."""
    with pytest.raises(RankFailedError, match=r"^rank \d of 2 .*looks_\w+\.py:7 .*ImportError: no GPU"):
        looked("raise ImportError('no GPU')")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_a_process_above_the_ranks_is_killed(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """One line that names a rank and the signal; nothing is left."""

    def kills(info: RankInfo) -> None:
        supervisor = psutil.Process(os.getppid())
        if info.rank == 1:
            os.kill(supervisor.pid if victim == "supervisor" else supervisor.ppid(), signal.SIGKILL)
        signal.pause()

    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    who = 1 if victim == "supervisor" else r"\d"
    with pytest.raises(RankFailedError, match=rf"^rank {who} of 2 on .*: ended by SIGKILL"):
        run_ranks(Launch(processes=2, timeout_seconds=120), kills)
    monkeypatch.delenv(MARK)
    assert left_of(mark) == {}


SCRIPT = """\
from everyrank.launch import Launch, run_ranks

print("the script", flush=True)


def rank(info):
    import torch

    return rank.__module__, torch.cuda.is_initialized(), torch.ones(2).sum().item()


print(run_ranks(Launch(processes=2), rank))
"""


def test_a_script_without_a_guard(cli: Cli, tmp_path: Path) -> None:
    """From end to end: its main module is not run again, and what it sends by value arrives."""
    (tmp_path / "script.py").write_text(SCRIPT)
    running = cli.start(tmp_path, "script.py", command=(), is_forked=False)
    status, out, err = running.end()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["the script", str(dict.fromkeys(range(2), ("__main__", False, 2.0)))]
    assert running.left() == {}
