"""Ranks that do not respond: the state of their processes, and supervisors stopped by a signal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from everyrank.errors import LOCATION_PATTERN

__all__ = ["concerns_others", "diagnose_stalled", "is_a_wait", "lost_another", "resume_stopped"]

# the error of a backend after the timeout for another rank
_TIMEOUT = re.compile(r"(gloo|nccl|\bshm\b|\bmpi\b).*tim(ed|e) ?out", re.IGNORECASE)
# what gloo, nccl and the store of torch report if another rank has ended; user code may lose other connections
_PEER_ENDED = (
    r"(gloo|nccl|c10d|\bDist\w*Error|SocketImpl).*((closed|reset) by peer|broken pipe)|failed to recv, got 0 bytes|"
    r"remote process exited|did the remote server shutdown|ncclRemoteError"
)
# the error if another rank calls a different collective, for which gloo aborts; torch's allocator has this form, too
_MISMATCH = re.compile(
    rf"call the same collectives in the same order|enforce fail at [^\]]*gloo|{_PEER_ENDED}", re.IGNORECASE
)
# the error if another rank has ended
_LOST = re.compile(rf"{_PEER_ENDED}|\b(shm|mpi) \w+: rank .* has ended", re.IGNORECASE)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_STATES = {
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a driver (state D)",
    psutil.STATUS_RUNNING: "it is computing something else (state R)",
    psutil.STATUS_ZOMBIE: "it has ended",
}


def is_a_wait(message: str) -> bool:
    """Whether an error message is a timeout while waiting for another rank."""
    return _has(_TIMEOUT, message)


def lost_another(message: str) -> bool:
    """Whether a rank failed because another rank has ended, which is the cause."""
    return _has(_LOST, message)


def concerns_others(message: str) -> bool:
    """Whether an error message is caused by another rank: it did not arrive, or called a different collective."""
    return is_a_wait(message) or _has(_MISMATCH, message)


def _has(pattern: re.Pattern[str], message: str) -> bool:
    # without the location, because the user's file may have the name of a backend
    return pattern.search(re.sub(LOCATION_PATTERN, "", message)) is not None


def diagnose_stalled(directory: Path, ranks: Sequence[int]) -> dict[int, str]:
    """Return the state of each rank, or only of the stopped ones if some are stopped by a signal."""
    states = {rank: _state(directory / f"rank{rank}.pid") for rank in ranks}
    stopped = {rank: text for rank, text in states.items() if "stopped" in text}
    return stopped or states


def _state(path: Path) -> str:
    """Return the state of the process in this pid file, which is empty for a process on another machine."""
    with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
        process = psutil.Process(int(path.read_text().split()[0]))
        status = process.status()
        if status in _STOPPED:
            return f"a signal has stopped it (kill -CONT {process.pid})"
        return f"{_STATES.get(status, 'it waits for something else')}, process {process.pid}"
    return "it does not respond"


def resume_stopped(directory: Path) -> None:
    """Resume supervisors that are stopped by a signal when their rank has ended, so that they report how it ended."""
    for path in directory.glob("rank*.pid"):
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
            rank = psutil.Process(int(path.read_text().split()[0]))
            supervisor = rank.parent() if rank.status() == psutil.STATUS_ZOMBIE else None
            if supervisor is not None and supervisor.status() in _STOPPED:
                supervisor.resume()
