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
_LEFT_SECONDS = 20.0  # after the end, for ranks to notice that whoever started them is gone


@dataclass(frozen=True)
class TrainCall:
    """One call of `everyrank train`, as JSON can carry it.

    source, launch   the fields of `Source` and of `Launch`
    run              the folder of the run
    resume           what to go on from: "", the run, or a checkpoint
    injections       the fields of an `Injection` each
    kept             where a run on a disk of its own is copied to when it ends
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
    injected_at     when the last fault was injected (on the first rank), in seconds since 1970; None without one
    begun           when the process was started, in seconds since 1970
    ended, cleared  when the process ended, and when all processes that it started had ended, in seconds since 1970
    left            how many processes were still running a while later and were killed
    """

    status: int | None = None
    message: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    injected_at: float | None = None
    begun: float = 0.0
    ended: float = 0.0
    cleared: float = 0.0
    left: int = 0


def run_trainer(call: TrainCall, folder: Path, limit_seconds: float, disk_bytes: int = 0) -> TrainerRun:
    """Train as `call` says; `folder` is for what is left beside the run.

    With `disk_bytes` the run lies on a disk of this size, made for it. A launch of two nodes has two hosts made for it.
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
    mark, result = uuid.uuid4().hex, TrainerRun(begun=time.time())
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
        _clear(mark, result, process)
    reader.join(5.0)
    return _how(folder, result)


def _read(stream: IO[bytes], lines: list[tuple[float, str]]) -> None:
    lines.extend((time.time(), line.decode(errors="replace").rstrip()) for line in stream)


def _watch(process: subprocess.Popen[bytes], journal: Path, result: TrainerRun, limit_seconds: float) -> None:
    """Until the process has ended, or has taken far too long; a rank that pauses is sent SIGCONT after a while."""
    deadline = time.monotonic() + limit_seconds
    continued: set[int] = set()
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        for row in _rows(journal):
            is_over = row["fault"] == "pause-rank" and time.time() > row["time"] + _PAUSE_SECONDS
            if is_over and row["update"] not in continued:
                continued.add(row["update"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(row["process"], signal.SIGCONT)
    result.status, result.ended = process.poll(), time.time()


def _rows(journal: Path) -> list[dict[str, Any]]:
    """What was struck, and when; the last line may be half written."""
    text = journal.read_text() if journal.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(rows, key=lambda row: row["time"])


def _clear(mark: str, result: TrainerRun, process: subprocess.Popen[bytes]) -> None:
    """Wait until nothing of it runs any more; what does not end by itself is counted, and ended."""
    if result.status is None:  # the command takes its ranks and folders with it
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + _LEFT_SECONDS
    while (running := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    result.left, result.cleared = len(running), time.time()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """All processes with the mark in their environment; those that have ended and wait for their parent have none."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def _how(folder: Path, result: TrainerRun) -> TrainerRun:
    rows = _rows(folder / "journal")
    result.injected_at = next((row["time"] for row in rows if row["update"] == rows[-1]["update"]), None)
    if (folder / "ended.json").exists():
        result.message = json.loads((folder / "ended.json").read_text(encoding="utf-8"))["message"]
    elif result.lines and result.status != -signal.SIGKILL:
        result.message = result.lines[-1][1]
    return result


def _on_own_disk(disk: Path, size: int, command: list[str]) -> list[str]:
    """The command, where `disk` is a file system of this many bytes that nobody else sees."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))}; exec {shlex.join(command)}"
    own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *own_user, "--mount", "sh", "-ec", mount]


def why_no_disk(folder: Path) -> str:
    """Why no disk of its own can be made here; "" where it can."""
    mount_point = folder / "disk-probe"
    mount_point.mkdir(exist_ok=True)
    try:
        command = _on_own_disk(mount_point, 1 << 20, ["true"])
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"no disk of its own: unshare: {error}"
    error_lines = done.stderr.strip().splitlines() or ["unshare or mount failed"]
    return "" if done.returncode == 0 else f"no disk of its own: {error_lines[-1]}"
