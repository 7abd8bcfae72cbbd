"""The lock of a run folder: one run at a time. The folder is free again after its run has ended or died."""

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
    """Start a process that locks the folder. `locks="without"` simulates a file system without kernel locks."""
    command = [sys.executable, "-c", HOLDER, str(run), where, locks, *job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> None:
    """Let the process release the lock and exit, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without kernel locks."""

    def raise_no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", raise_no_locks)


@pytest.mark.parametrize("locks", ["with", "without"])
def test_second_run_in_a_folder_is_refused(tmp_path: Path, locks: str) -> None:
    """The error names the process that holds the lock. The folder is free after this process has ended."""
    with held(tmp_path / "run", locks=locks) as process:
        with (
            pytest.raises(UsageError, match=rf"another run uses it \(process {process.pid} on .*, since "),
            hold(tmp_path / "run"),
        ):
            pass
        end(process)
    assert not (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run", locks=locks) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert (tmp_path / "run" / LOCK).exists()
        with hold(tmp_path / "run"):
            assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / LOCK).exists()


def test_two_folders_at_once_and_one_folder_twice(tmp_path: Path) -> None:
    with hold(tmp_path / "one"), hold(tmp_path / "two"):
        pass
    with hold(tmp_path / "one"):
        pass


def test_lock_with_a_reused_process_id_is_free(tmp_path: Path, no_locks: None) -> None:
    """A process with the id in the file holds the lock only if its start time is the same. A reboot reuses ids."""
    start_time = psutil.Process(os.getppid()).create_time()
    parent = lock._this_process()._replace(pid=os.getppid(), started=start_time)
    (tmp_path / LOCK).write_text(json.dumps(parent._asdict()))
    with pytest.raises(UsageError, match=f"process {os.getppid()} on"), hold(tmp_path):
        pass
    (tmp_path / LOCK).write_text(json.dumps(parent._replace(started=start_time - 3600)._asdict()))
    with hold(tmp_path):
        pass


def test_folder_of_a_live_run_on_another_host_is_refused(tmp_path: Path, no_locks: None) -> None:
    """The file system has no locks. The holder is alive because it updates the time of the file."""
    remote_holder = held(tmp_path, "elsewhere", "without")
    with remote_holder, pytest.raises(UsageError, match=r"process \d+ on node7"), hold(tmp_path):
        pass


def test_folder_of_a_dead_run_on_another_host_is_taken_over(
    tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is taken over after its file was not updated for a while. So a job restarted on a new host resumes."""
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 1.0)
    with held(tmp_path, "elsewhere", "without") as process:
        process.kill()
        process.wait(timeout=60)
        with hold(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_next_start_of_the_same_job_takes_over_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of a host, rank 0 is on a different host. It waits only until the kernel's lock is released."""
    monkeypatch.setattr(lock, "_beats", lambda _: pytest.fail("it was watched"))
    with held(tmp_path, "elsewhere", "with", "n1:29500") as process:
        start = time.monotonic()
        monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 1.0)
        with pytest.raises(UsageError, match="another run uses it"), hold(tmp_path, "n1:29500"):
            pass
        assert time.monotonic() > start + 1.0
        with pytest.raises(UsageError, match="another run uses it"), hold(tmp_path, "n1:29501"):
            pass
        assert time.monotonic() < start + 60.0
        monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 60.0)
        threading.Timer(0.5, process.kill).start()
        with hold(tmp_path, "n1:29500"):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": 1', "\x00" * 64, '"x"'])
def test_invalid_lock_file_is_ignored(tmp_path: Path, content: str) -> None:
    """For example, a full disk leaves such a file."""
    (tmp_path / LOCK).write_text(content)
    with hold(tmp_path):
        pass


def test_lock_file_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    """The link is not followed, because the folder may come from an untrusted source."""
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"), hold(tmp_path):
        pass
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_train_in_a_locked_folder_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A new run and a resumed run are refused. No file changes, and the run can be resumed afterwards."""
    args = ("train", "digits", "--set", "width=4", "--device", "cpu", "--evaluate-every", "0", "--out", "run")
    assert cli.on_ranks(tmp_path, *args, "--steps", "2").status == 0
    run = tmp_path / "run"
    (run / "record.json").unlink()
    original_files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with hold(run):
        result = cli.on_ranks(tmp_path, *args, "--steps", "4", "--resume")
        assert result.status == 2
        (line,) = result.err.splitlines()
        assert f"another run uses it (process {os.getpid()} on " in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == original_files
    with hold(tmp_path / "new"):
        assert cli.on_ranks(tmp_path, *args[:-1], "new", "--steps", "2").status == 2
    assert not checkpoints_of(tmp_path / "new")
    assert cli.on_ranks(tmp_path, *args, "--steps", "4", "--resume").status == 0
    assert [checkpoint.metadata.step for checkpoint in checkpoints_of(run)] == [2, 4]
