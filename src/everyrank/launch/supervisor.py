"""The supervisor: the parent process of one rank, which records how the rank ended.

Launchers report different parts of how a rank died. So under every launcher, each rank is forked from a
supervisor. It records the exit code or the signal, and whether the kernel killed the rank because memory ran out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from everyrank.launch.host_info import host_name, pid_namespace
from everyrank.launch.job import Job
from everyrank.launch.signals import is_end_requested

__all__ = ["end_with_parent", "supervise", "write_whole"]

_POLL_SECONDS = 0.25
_STOP_INTERVAL_SECONDS = 0.5  # A rank that is still starting ignores SIGUSR1, so the request to stop is repeated.
_HEARTBEAT_TIMEOUT_SECONDS = 60.0  # of a parent on another machine


def supervise(job: Job, rank: int, directory: Path) -> None:
    """Fork the rank. Returns in the child, which is the rank; the supervisor exits with the status of the rank."""
    kills_before, supervisor_pid = _num_oom_kills(), os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(supervisor_pid)
        return

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    ending = threading.Event()
    watch = threading.Thread(target=_watch, args=(job, child, directory, ending), daemon=True)
    watch.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ending.is_set():
        watch.join()  # it deletes the job folder and ends this process
    row = {"rank": rank, "host": host_name(), "code": code, "time": time.time()}
    row["for_memory"] = code == -signal.SIGKILL and _num_oom_kills() > kills_before
    with contextlib.suppress(OSError):  # the parent has already deleted the folder
        write_whole(directory / f"rank{rank}.exit", json.dumps(row).encode())
    os._exit(128 - code if code < 0 else code)


def _watch(job: Job, child: int, directory: Path, ending: threading.Event) -> None:
    """Forward requests to stop to the rank. End both when the launcher or the parent process of the job is gone."""
    launcher_pid, requested_at = os.getppid(), 0.0
    # a rank that is started again gets no SIGUSR1 that was passed on to the earlier start
    forwarded = "" if is_end_requested(directory) else _stop_request(directory)
    is_local = pid_namespace() == job.pid_namespace
    parent_lives = _process_lives(job.parent_pid) if is_local else _heartbeat_lives(directory)
    while True:
        time.sleep(_POLL_SECONDS)
        request = _stop_request(directory)
        if request == "" and time.monotonic() > requested_at + _STOP_INTERVAL_SECONDS:
            requested_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)
        elif request and request != forwarded:  # the file holds "COUNT SIGNAL", and each count is forwarded once
            forwarded = request
            with contextlib.suppress(ProcessLookupError, ValueError, IndexError):
                os.kill(child, int(request.split()[1]))
        is_orphan = not parent_lives()
        if is_orphan or os.getppid() != launcher_pid:
            ending.set()
            if is_orphan and job.is_restarted and os.getppid() == launcher_pid > 1:
                # The launcher would restart these ranks, although their job is gone. When killed, it ends all hosts.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(launcher_pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            if is_orphan and is_local:  # the parent is gone and cannot delete these folders
                for folder in (directory, *([] if job.keeps_logs else [job.logs])):
                    shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _stop_request(directory: Path) -> str | None:
    """Return the content of the file that requests a stop; None without one."""
    with contextlib.suppress(OSError):
        return (directory / "stop").read_text()
    return None


def _process_lives(pid: int) -> Callable[[], bool]:
    def lives() -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:  # a process of another user, which cannot be inspected
            return True

    return lives


def _heartbeat_lives(directory: Path) -> Callable[[], bool]:
    """Return a check whether the parent on another machine is alive. It touches a file in the job folder.

    The parent deletes the folder when it ends. Only changes of the time count, because clocks may differ.
    """
    last_beat, changed_at = 0.0, time.monotonic()

    def lives() -> bool:
        nonlocal last_beat, changed_at
        beat = last_beat
        try:
            beat = (directory / "alive").stat().st_mtime
        except FileNotFoundError:
            return False
        except OSError:  # storage that does not respond at the moment
            pass
        if beat != last_beat:
            last_beat, changed_at = beat, time.monotonic()
        return time.monotonic() < changed_at + _HEARTBEAT_TIMEOUT_SECONDS

    return lives


def end_with_parent(parent_pid: int, end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Call `end`, by default exit, as soon as the parent process is gone."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        end()

    threading.Thread(target=watch, daemon=True, name="everyrank-parent-watch").start()


def _num_oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for memory; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                file = Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                file = Path("/sys/fs/cgroup/memory") / group.lstrip("/") / "memory.oom_control"
            else:
                continue
            if file.exists():
                counts = dict(row.split() for row in file.read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return 0


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
