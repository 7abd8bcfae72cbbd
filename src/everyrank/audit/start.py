"""Starts a user's script with hooks, and always ends its processes and their children."""

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from everyrank.audit.guardian import end_script_processes, guarded
from everyrank.audit.script import without_gpus
from everyrank.audit.watch.recorder import ACCELERATE_ON_CPU, ENVIRONMENT, Settings

__all__ = ["IDLE_SHARE", "ScriptRun", "cpu_seconds_of", "run_script"]

_INJECT = str(Path(__file__).parent / "watch" / "inject")
_POLL_SECONDS = 0.1
_AFTER_FAILURE_SECONDS = 3.0  # for the other ranks to print their errors
_MAX_OUTPUT_BYTES = 4 * 2**20  # to keep for each process, in addition to the last lines
_LAST_LINES = 200
IDLE_SHARE = 0.05  # of a core; processes that compute use more


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """How the processes of a script ended.

    status   "finished": all processes exited with 0; "failed": one did not; "hangs": no process made progress for too
             long; "timed_out": the time limit ended them
    codes    exit status of each process, -N after signal N; None if the audit ended it
    outputs  stdout and stderr of each process, in the order in which it wrote them
    """

    folder: Path
    world_size: int
    status: str
    codes: tuple[int | None, ...]
    outputs: tuple[str, ...]
    seconds: float


def run_script(
    python_args: Sequence[str],
    settings: Settings,
    ranks: Sequence[dict[str, str]],
    timeout_seconds: float,
    limit_seconds: float,
    world_size: int,
    on_update: Callable[[int], None],
    ends_all_processes: bool = True,
) -> ScriptRun:
    """Run `python *python_args` once for each environment of `ranks`, until all end, hang, or run for too long.

    python_args         the arguments of Python: a script and its arguments, or -m and a module
    timeout_seconds     a script without an event or CPU use for this time counts as hanging
    limit_seconds       time limit of the whole run
    on_update           called with the number of updates of rank 0 when it grows
    ends_all_processes  also end all processes that inherited the environment of this run, such as other ranks
    """
    folder, started = Path(settings.folder), time.monotonic()
    processes: list[_Process] = []
    with contextlib.ExitStack() as stack:
        if ends_all_processes:
            stack.enter_context(guarded(folder))
        stack.callback(_end, processes, folder, ends_all_processes)
        for variables in ranks:  # append one by one, so that an error ends the processes that have started
            process = _Process(
                [sys.executable, *python_args], {**os.environ, **variables, **_hook_environment(settings)}
            )
            processes.append(process)
        status = _wait(processes, folder, started, timeout_seconds, limit_seconds, on_update)
        if status not in ("finished", "failed"):
            _request_stacks(folder)
        codes = tuple(process.process.poll() for process in processes)
    outputs = tuple(process.output() for process in processes)
    return ScriptRun(folder, world_size, status, codes, outputs, time.monotonic() - started)


def _end(processes: Sequence[_Process], folder: Path, ends_all_processes: bool) -> None:
    for process in processes:
        process.end()
    if ends_all_processes:
        end_script_processes(folder)


def rank_environments(num_ranks: int) -> list[dict[str, str]]:
    """The environment variables that torchrun sets on each rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    world_size = str(num_ranks)
    shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": "audit",
    }
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if hidden_gpus := without_gpus(num_ranks):
        shared |= {**hidden_gpus, ACCELERATE_ON_CPU: "1"}  # otherwise Accelerate ignores the other ranks
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(num_ranks)]


_NO_TRACKERS = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
"""Disables experiment trackers, because an audit must not write into the user's folders and projects."""


def _hook_environment(settings: Settings) -> dict[str, str]:
    """The environment variables that install the hooks in every Python process of the script."""
    package = str(Path(__file__).parents[2])  # everyrank may not be installed where the script runs
    old_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [_INJECT, settings.shim, *old_path, package]))
    extra = {} if settings.keep_files else {"PYTHONDONTWRITEBYTECODE": "1", **_NO_TRACKERS}
    return {ENVIRONMENT: settings.to_json(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}


class _Process:
    """A process in its own session. Keeps the beginning and the end of its output."""

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
        num_kept = 0
        with stream:
            while line := stream.readline(65536):
                if num_kept < _MAX_OUTPUT_BYTES:
                    self.first.append(line)
                    num_kept += len(line)
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
    on_update: Callable[[int], None],
) -> str:
    """Wait until all processes have ended, and return the status."""
    num_bytes, progress_time, cpu_seconds = 0, time.monotonic(), 0.0
    while True:
        codes = [process.process.poll() for process in processes]
        now, num_bytes_now = time.monotonic(), _event_bytes(folder)
        cpu_seconds_now = cpu_seconds_of(process.process.pid for process in processes)
        # the time of a child is lost if its parent does not wait for it
        cpu_seconds = min(cpu_seconds, cpu_seconds_now)
        if num_bytes_now != num_bytes or cpu_seconds_now > cpu_seconds + IDLE_SHARE * max(1.0, now - progress_time):
            num_bytes, progress_time, cpu_seconds = num_bytes_now, now, cpu_seconds_now
            on_update(_num_updates(folder))
        if all(code is not None for code in codes):
            return "failed" if any(codes) else "finished"
        if any(codes) and now > progress_time + _AFTER_FAILURE_SECONDS:
            return "failed"
        if now > progress_time + timeout_seconds:
            return "hangs"
        if now > started + limit_seconds:
            return "timed_out"
        time.sleep(_POLL_SECONDS)


def _event_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("pid*.jsonl"))


def _num_updates(folder: Path) -> int:
    """The number of updates whose gradients rank 0 has written."""
    return len(list(folder.glob("rank0.update*.npz")))


def cpu_seconds_of(process_ids: Iterable[int]) -> float:
    """Return the CPU seconds of the processes and of all their children, also of those that have ended."""
    total = 0.0
    for process_id in process_ids:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(process_id)
            for descendant in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    cpu_times = descendant.cpu_times()
                    total += cpu_times.user + cpu_times.system + cpu_times.children_user + cpu_times.children_system
    return total


def _request_stacks(folder: Path) -> None:
    """Send SIGUSR1 to the hooked processes, so that each writes its stack."""
    for path in folder.glob("stack*"):
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            os.kill(int(path.name.removeprefix("stack")), signal.SIGUSR1)
    time.sleep(1.0)
