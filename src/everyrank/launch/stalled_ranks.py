"""Ranks that say nothing: what their own machine knows of them, and supervisors that somebody has stopped."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

__all__ = ["concerns_others", "diagnose_stalled", "is_a_wait", "resume_stopped"]

# what a backend says when the time is up in which another rank had to come
_WAITED = re.compile(r"(gloo|nccl|shm|mpi).*tim(ed|e) ?out", re.IGNORECASE)
# or that another rank calls something else, for which gloo aborts it
_CALLED = re.compile(r"call the same collectives in the same order|enforce fail|(closed|reset) by peer", re.IGNORECASE)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_STATES = {
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a driver (state D)",
    psutil.STATUS_RUNNING: "it computes something else (state R)",
    psutil.STATUS_ZOMBIE: "it has ended",
}


def is_a_wait(message: str) -> bool:
    """Whether what a rank reported is that it has waited too long for another one."""
    return bool(_WAITED.search(message))


def concerns_others(message: str) -> bool:
    """Whether what a rank reported is that another one did not come, or has called another collective."""
    return is_a_wait(message) or bool(_CALLED.search(message))


def diagnose_stalled(directory: Path, silent: Sequence[int]) -> dict[int, str]:
    """What the ranks that say nothing are doing; where some of them have been stopped, those alone."""
    states = {rank: _state(directory / f"rank{rank}.pid") for rank in silent}
    stopped = {rank: text for rank, text in states.items() if "stopped" in text}
    return stopped or states


def _state(path: Path) -> str:
    """By the process that this file names, which is empty where that process is on another machine."""
    with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
        process = psutil.Process(int(path.read_text().split()[0]))
        status = process.status()
        if status in _STOPPED:
            return f"a signal has stopped it (kill -CONT {process.pid})"
        return f"{_STATES.get(status, 'it waits for something else')}, process {process.pid}"
    return "it says nothing"


def resume_stopped(directory: Path) -> None:
    """Let supervisors go on that somebody has stopped, when their rank has ended: nobody else would say so."""
    for path in directory.glob("rank*.pid"):
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
            rank = psutil.Process(int(path.read_text().split()[0]))
            supervisor = rank.parent() if rank.status() == psutil.STATUS_ZOMBIE else None
            if supervisor is not None and supervisor.status() in _STOPPED:
                supervisor.resume()
