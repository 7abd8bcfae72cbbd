"""The supervisor of each rank, a process of its own that imports nothing: how the rank ended, whoever started it.

Launchers differ in what they say of a rank that died, and none says all of it. So each rank is forked from a
supervisor, which writes down the exit code or the signal, and whether the kernel killed for memory.
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

__all__ = ["end_with_parent", "supervise", "write_whole"]

_LOOK_SECONDS = 0.25
_ASK_SECONDS = 0.5  # between two requests to stop: a rank that is still starting does not catch them yet
_SILENCE_SECONDS = 60.0  # of a parent on another machine


def supervise(job: Job, rank: int, directory: Path) -> None:
    """Fork. Returns in the child, which is the rank; the supervisor never returns: it ends as the rank did."""
    kills_before, own_pid = _kills_for_memory(), os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(own_pid)
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    ending = threading.Event()
    watch = threading.Thread(target=_watch, args=(job, child, directory, ending), daemon=True)
    watch.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ending.is_set():
        watch.join()  # it tidies up, and ends this process
    row = {"rank": rank, "host": host_name(), "code": code, "time": time.time()}
    row["for_memory"] = code == -signal.SIGKILL and _kills_for_memory() > kills_before
    with contextlib.suppress(OSError):  # the parent has tidied up already
        write_whole(directory / f"rank{rank}.exit", json.dumps(row).encode())
    os._exit(128 - code if code < 0 else code)


def _watch(job: Job, child: int, directory: Path, ending: threading.Event) -> None:
    """Pass on a request to stop; end the rank, and this process, when whoever started it, or the person's, is gone."""
    starter, asked = os.getppid(), 0.0
    lives = _pid_watch(job.parent_pid) if pid_namespace() == job.pid_namespace else _beat_watch(directory)
    while True:
        time.sleep(_LOOK_SECONDS)
        if (directory / "stop").exists() and time.monotonic() > asked + _ASK_SECONDS:
            asked = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)
        is_orphan = not lives()
        if is_orphan or os.getppid() != starter:
            ending.set()
            if is_orphan and job.is_restarted and os.getppid() == starter > 1:
                # it would start ranks again whose job is gone, and when it gives up end that of all other hosts
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(starter, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            if is_orphan and pid_namespace() == job.pid_namespace:  # nobody else is left to tidy up
                for folder in (directory, *([] if job.keeps_logs else [job.logs])):
                    shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _pid_watch(pid: int) -> Callable[[], bool]:
    def lives() -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:  # somebody else's, who may not be asked
            return True

    return lives


def _beat_watch(directory: Path) -> Callable[[], bool]:
    """A parent on another machine touches its directory, and removes it when it ends. Clocks may differ."""
    seen, changed = 0.0, time.monotonic()

    def lives() -> bool:
        nonlocal seen, changed
        beat = seen
        try:
            beat = (directory / "alive").stat().st_mtime
        except FileNotFoundError:
            return False
        except OSError:  # storage that does not answer just now: silence
            pass
        if beat != seen:
            seen, changed = beat, time.monotonic()
        return time.monotonic() < changed + _SILENCE_SECONDS

    return lives


def end_with_parent(parent_pid: int, end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Call `end`, which ends this process, as soon as its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        end()

    threading.Thread(target=watch, daemon=True, name="everyrank-parent-watch").start()


def _kills_for_memory() -> int:
    """How often the kernel has killed in this control group because its memory was used up; 0 where none is read."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers == "":
                file = Path("/sys/fs/cgroup") / place.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                file = Path("/sys/fs/cgroup/memory") / place.lstrip("/") / "memory.oom_control"
            else:
                continue
            if file.exists():
                counts = dict(row.split() for row in file.read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return 0


def write_whole(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
