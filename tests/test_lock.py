"""A folder holds one run at a time; that of a run that has died is free again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import everyrank.runs.lock as lock
from everyrank.errors import UsageError
from everyrank.runs import checkpoints_of, hold
from everyrank.runs.lock import LOCK
from processes import Cli

HOLDER = """
import pathlib, sys
from everyrank.runs import lock
if sys.argv[2] == "elsewhere":
    lock.pid_namespace, lock.host_name, lock._BEAT_SECONDS = lambda: "another", lambda: "node7", 0.1
if sys.argv[3] == "without":
    lock._lock = lambda file: True
with lock.hold(pathlib.Path(sys.argv[1]), *sys.argv[4:]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(run: Path, where: str = "here", locks: str = "with", *job: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder; `without`: on a file system without the kernel's locks."""
    command = [sys.executable, "-c", HOLDER, str(run), where, locks, *job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refused)


@pytest.mark.parametrize("locks", ["with", "without"])
def test_a_second_run_is_refused_and_told_who_holds_it(tmp_path: Path, locks: str) -> None:
    """One line; the folder is free again when the first run has ended, or was killed."""
    with held(tmp_path / "run", locks=locks) as process:
        with (
            pytest.raises(UsageError, match=rf"another run uses it \(process {process.pid} on .*, since "),
            hold(tmp_path / "run"),
        ):
            pass
        ended(process)
    assert not (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run", locks=locks) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert (tmp_path / "run" / LOCK).exists()
        with hold(tmp_path / "run"):
            assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / LOCK).exists()


def test_two_folders_and_one_after_the_other(tmp_path: Path) -> None:
    with hold(tmp_path / "one"), hold(tmp_path / "two"):
        pass
    with hold(tmp_path / "one"):
        pass


def test_a_number_that_belongs_to_another_process_by_now(tmp_path: Path, no_locks: None) -> None:
    """Neither the number alone nor a machine that was started again keeps a folder."""
    started = psutil.Process(os.getppid()).create_time()
    mine = lock._this_process()._replace(pid=os.getppid(), started=started)
    (tmp_path / LOCK).write_text(json.dumps(mine._asdict()))
    with pytest.raises(UsageError, match=f"process {os.getppid()} on"), hold(tmp_path):
        pass
    (tmp_path / LOCK).write_text(json.dumps(mine._replace(started=started - 3600)._asdict()))
    with hold(tmp_path):
        pass


def test_a_run_on_another_host_that_lives(tmp_path: Path, no_locks: None) -> None:
    """The file system carries no locks: the holder's beats are seen."""
    held_there = held(tmp_path, "elsewhere", "without")
    with held_there, pytest.raises(UsageError, match=r"process \d+ on node7"), hold(tmp_path):
        pass


def test_a_run_on_another_host_that_has_died(tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is watched for a while, and then taken over: a job that is started again elsewhere goes on."""
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 1.0)
    with held(tmp_path, "elsewhere", "without") as process:
        process.kill()
        process.wait(timeout=60)
        with hold(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_the_next_start_of_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is on another host after a loss: the folder is taken over without watching, but for the kernel's lock."""
    monkeypatch.setattr(lock, "_beats", lambda _: pytest.fail("it was watched"))
    with held(tmp_path, "elsewhere", "with", "n1:29500") as process:
        waited = time.monotonic()
        monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 1.0)
        with pytest.raises(UsageError, match="another run uses it"), hold(tmp_path, "n1:29500"):
            pass
        assert time.monotonic() > waited + 1.0
        with pytest.raises(UsageError, match="another run uses it"), hold(tmp_path, "n1:29501"):
            pass
        assert time.monotonic() < waited + 60.0
        monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 60.0)
        threading.Timer(0.5, process.kill).start()
        with hold(tmp_path, "n1:29500"):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": 1', "\x00" * 64, '"x"'])
def test_a_lock_that_says_nothing(tmp_path: Path, content: str) -> None:
    """As a full disk leaves it."""
    (tmp_path / LOCK).write_text(content)
    with hold(tmp_path):
        pass


def test_a_lock_that_is_no_file(tmp_path: Path) -> None:
    """A link is not followed: the folder may be somebody else's."""
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"), hold(tmp_path):
        pass
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_the_command_line_does_not_train_in_a_folder_that_is_held(cli: Cli, tmp_path: Path) -> None:
    """Neither a new run nor one that goes on; nothing in the folder is touched, and afterwards it goes on."""
    words = ("train", "digits", "--set", "width=4", "--device", "cpu", "--evaluate-every", "0", "--out", "run")
    assert cli.on_ranks(tmp_path, *words, "--steps", "2").status == 0
    run = tmp_path / "run"
    (run / "record.json").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with hold(run):
        done = cli.on_ranks(tmp_path, *words, "--steps", "4", "--resume")
        assert done.status == 2
        (line,) = done.err.splitlines()
        assert f"another run uses it (process {os.getpid()} on " in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with hold(tmp_path / "new"):
        assert cli.on_ranks(tmp_path, *words[:-1], "new", "--steps", "2").status == 2
    assert not checkpoints_of(tmp_path / "new")
    assert cli.on_ranks(tmp_path, *words, "--steps", "4", "--resume").status == 0
    assert [one.metadata.step for one in checkpoints_of(run)] == [2, 4]
