"""Starts a user's script with hooks, and always ends its processes and those that they have started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from everyrank.audit.guardian import end_all_of, guarded
from everyrank.audit.script import without_gpus
from everyrank.audit.watch.recorder import ACCELERATE_ON_CPU, ENVIRONMENT, Settings

__all__ = ["ScriptRun", "run_script"]

_INJECT = str(Path(__file__).parent / "watch" / "inject")
_LOOK_SECONDS = 0.1
_AFTER_FAILURE_SECONDS = 3.0  # for the other ranks to print their errors
_MOST_OUTPUT = 4 * 2**20  # bytes of output to keep for each process, besides the last lines
_LAST_LINES = 200
_IDLE_SHARE = 0.05  # of a core: computing processes use more


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """How the processes of a script ended.

    status   "finished": all exited with 0; "failed": one did not; "hangs": none made progress for too long; "long": the
             time limit ended them
    codes    exit status of each process, -N after signal N; None: the audit ended it
    outputs  stdout and stderr of each, as they came
    """

    folder: Path
    world_size: int
    status: str
    codes: tuple[int | None, ...]
    outputs: tuple[str, ...]
    seconds: float


def run_script(
    words: Sequence[str],
    settings: Settings,
    ranks: Sequence[dict[str, str]],
    timeout_seconds: float,
    limit_seconds: float,
    world_size: int,
    moved: Callable[[int], None],
    ends_all: bool = True,
) -> ScriptRun:
    """Run `python *words` once for each environment of `ranks`, until it ends, hangs, or runs for too long.

    words            what Python is given: a script and its arguments, or -m and a module
    timeout_seconds  without an event or a computation, after which the script hangs
    limit_seconds    for the whole run
    moved            called with the number of updates of rank 0, as it grows
    ends_all         end every process that has written into the folder, also those of other ranks
    """
    folder, started = Path(settings.folder), time.monotonic()
    processes: list[_Process] = []
    with contextlib.ExitStack() as stack:
        if ends_all:
            stack.enter_context(guarded(folder))
        stack.callback(_end, processes, folder, ends_all)
        for variables in ranks:  # one by one, so that an error ends those that have started
            process = _Process([sys.executable, *words], {**os.environ, **variables, **_injected(settings)})
            processes.append(process)
        status = _wait(processes, folder, started, timeout_seconds, limit_seconds, moved)
        if status not in ("finished", "failed"):
            _ask_for_stacks(folder)
        codes = tuple(process.process.poll() for process in processes)
    outputs = tuple(process.output() for process in processes)
    return ScriptRun(folder, world_size, status, codes, outputs, time.monotonic() - started)


def _end(processes: Sequence[_Process], folder: Path, ends_all: bool) -> None:
    for process in processes:
        process.end()
    if ends_all:
        end_all_of(folder)


def rank_environments(processes: int) -> list[dict[str, str]]:
    """The environment variables that torchrun would give each of so many ranks."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    count = str(processes)
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "audit"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if hidden := without_gpus(processes):
        shared |= {**hidden, ACCELERATE_ON_CPU: "1"}  # otherwise Accelerate ignores the other ranks
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(processes)]


_NO_TRACKERS = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
"""Trackers write into the user's folders and projects, which an audit must not do."""


def _injected(settings: Settings) -> dict[str, str]:
    """The environment that puts the hooks into every Python process of the script."""
    package = str(Path(__file__).parents[2])  # everyrank may not be installed where the script runs
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [_INJECT, settings.shim, *before, package]))
    kept = {} if settings.keep_files else {"PYTHONDONTWRITEBYTECODE": "1", **_NO_TRACKERS}
    return {ENVIRONMENT: settings.written(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **kept}


class _Process:
    """A process in its own session. The beginning and the end of its output are kept."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(  # noqa: S603  (the user's script)
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.first: list[bytes] = []
        self.last: deque[bytes] = deque(maxlen=_LAST_LINES)
        assert self.process.stdout is not None
        self.reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        kept = 0
        while line := stream.readline(65536):
            if kept < _MOST_OUTPUT:
                self.first.append(line)
                kept += len(line)
            else:
                self.last.append(line)

    def output(self) -> str:
        self.reader.join(2.0)
        return b"".join([*self.first, *self.last]).decode(errors="replace")

    def end(self) -> None:
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _wait(
    processes: Sequence[_Process],
    folder: Path,
    started: float,
    timeout_seconds: float,
    limit_seconds: float,
    moved: Callable[[int], None],
) -> str:
    """Wait until all have ended, and return the status."""
    size, changed, busy = 0, time.monotonic(), 0.0
    while True:
        codes = [process.process.poll() for process in processes]
        now, size_now, busy_now = time.monotonic(), _written(folder), _cpu_seconds(processes)
        if size_now != size or busy_now > busy + _IDLE_SHARE * max(1.0, now - changed):
            size, changed, busy = size_now, now, busy_now
            moved(_updates(folder))
        if all(code is not None for code in codes):
            return "failed" if any(codes) else "finished"
        if any(codes) and now > changed + _AFTER_FAILURE_SECONDS:
            return "failed"
        if now > changed + timeout_seconds:
            return "hangs"
        if now > started + limit_seconds:
            return "long"
        time.sleep(_LOOK_SECONDS)


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("pid*.jsonl"))


def _updates(folder: Path) -> int:
    """The number of updates whose gradients rank 0 has written."""
    return len(list(folder.glob("rank0.update*.npz")))


def _cpu_seconds(processes: Sequence[_Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(process.process.pid)
            for each in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
    return total


def _ask_for_stacks(folder: Path) -> None:
    """Send SIGUSR1, upon which each watched process writes its stack."""
    for path in folder.glob("stack*"):
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            os.kill(int(path.name.removeprefix("stack")), signal.SIGUSR1)
    time.sleep(1.0)
