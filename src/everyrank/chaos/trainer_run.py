"""run_trainer: starts one training process, watches it to its end, and kills processes that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from everyrank.chaos.two_hosts import in_own_network
from everyrank.launch.job import PYTHON

__all__ = ["TrainCall", "TrainerRun", "run_trainer", "why_no_disk"]

_MARK = "EVERYRANK_CHAOS"  # environment variable of all processes of a run
_PAUSE_SECONDS = 2.0
_LEFT_SECONDS = 20.0  # time after the end for ranks to notice that their parent process is gone


@dataclass(frozen=True)
class TrainCall:
    """One call of `everyrank train`, as JSON can carry it.

    source, launch   the fields of `Source` and of `Launch`
    run              the folder of the run
    resume           the run or checkpoint to resume from; "": none
    injections       the fields of each `Injection`
    kept             folder to which a run on a separate disk is copied when it ends
    """

    source: dict[str, Any]
    layout: str
    launch: dict[str, Any]
    run: str
    steps: int
    save_every: int
    guard_every: int
    resume: str = ""
    injections: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    kept: str = ""


@dataclass
class TrainerRun:
    """How a run ended.

    status          the exit status; -N after signal N; None if it was killed after `limit_seconds`
    message         the last line of the output
    lines           (seconds since 1970, text) of what was printed
    injected_at     time of the last injection (on the first rank), in seconds since 1970; None without a fault
    started_at      start of the process, in seconds since 1970
    ended_at        end of the process, in seconds since 1970
    all_ended_at    end of the last process that it started, in seconds since 1970
    num_left        number of processes that did not end and were killed
    """

    status: int | None = None
    message: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    injected_at: float | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    all_ended_at: float = 0.0
    num_left: int = 0


def run_trainer(call: TrainCall, folder: Path, limit_seconds: float, disk_bytes: int = 0) -> TrainerRun:
    """Run a training in a process and return how it ended. `folder` gets the call, the journal and the end status.

    With `disk_bytes` the run is on a new file system of this size. A launch of two nodes runs on two simulated hosts.
    """
    folder.mkdir(parents=True)
    injections = [{**injection, "journal": str(folder / "journal")} for injection in call.injections]
    call = dataclasses.replace(call, injections=injections)
    is_one_host = call.launch["nodes"] == 1
    command = [
        *PYTHON,
        "-m",
        f"everyrank.chaos.{'trainer_process' if is_one_host else 'two_hosts'}",
        str(folder / "call.json"),
    ]
    command = command if is_one_host else in_own_network(f"exec {shlex.join(command)}")
    if disk_bytes:
        disk = folder / "disk"
        disk.mkdir()
        call = dataclasses.replace(call, run=str(disk / "run"), kept=call.run)
        command = _on_own_disk(disk, disk_bytes, command)
    (folder / "call.json").write_text(json.dumps(dataclasses.asdict(call)), encoding="utf-8")
    mark, result = uuid.uuid4().hex, TrainerRun(started_at=time.time())
    process = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, _MARK: mark},
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, result.lines), daemon=True)
    reader.start()
    try:
        _watch(process, folder / "journal", result, limit_seconds)
    finally:
        _end_processes(mark, result, process)
    reader.join(5.0)
    return _with_message(folder, result)


def _read(stream: IO[bytes], lines: list[tuple[float, str]]) -> None:
    lines.extend((time.time(), line.decode(errors="replace").rstrip()) for line in stream)


def _watch(process: subprocess.Popen[bytes], journal: Path, result: TrainerRun, limit_seconds: float) -> None:
    """Wait for the process until the time limit. Sends SIGCONT to a paused rank after `_PAUSE_SECONDS`."""
    deadline = time.monotonic() + limit_seconds
    continued: set[int] = set()
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        for row in _read_journal(journal):
            is_pause_over = row["fault"] == "pause-rank" and time.time() > row["time"] + _PAUSE_SECONDS
            if is_pause_over and row["update"] not in continued:
                continued.add(row["update"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(row["process"], signal.SIGCONT)
    result.status, result.ended_at = process.poll(), time.time()


def _read_journal(journal: Path) -> list[dict[str, Any]]:
    """Return the injections in the journal, sorted by time; ignores an incomplete last line."""
    text = journal.read_text() if journal.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(rows, key=lambda row: row["time"])


def _end_processes(mark: str, result: TrainerRun, process: subprocess.Popen[bytes]) -> None:
    """Wait until all processes of the run have ended; count and kill those that do not end."""
    if result.status is None:  # on SIGINT the command ends its ranks and removes its folders
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + _LEFT_SECONDS
    while (running := _find_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    result.num_left, result.all_ended_at = len(running), time.time()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _find_processes(mark: str) -> list[int]:
    """Return all processes with the mark in their environment, without zombies, which have no environment."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def _with_message(folder: Path, result: TrainerRun) -> TrainerRun:
    rows = _read_journal(folder / "journal")
    result.injected_at = next((row["time"] for row in rows if row["update"] == rows[-1]["update"]), None)
    if (folder / "ended.json").exists():
        result.message = json.loads((folder / "ended.json").read_text(encoding="utf-8"))["message"]
    elif result.lines and result.status != -signal.SIGKILL:
        result.message = result.lines[-1][1]
    return result


def _on_own_disk(disk: Path, size: int, command: list[str]) -> list[str]:
    """Return the command, with `disk` mounted as a private file system of `size` bytes."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))}; exec {shlex.join(command)}"
    user_option = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user_option, "--mount", "sh", "-ec", mount]


def why_no_disk(folder: Path) -> str:
    """Return why a separate disk cannot be made here; "" if it can."""
    mount_point = folder / "disk-probe"
    mount_point.mkdir(exist_ok=True)
    try:
        command = _on_own_disk(mount_point, 1 << 20, ["true"])
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"no separate disk: unshare: {error}"
    error_lines = completed.stderr.strip().splitlines() or ["unshare or mount failed"]
    return "" if completed.returncode == 0 else f"no separate disk: {error_lines[-1]}"
