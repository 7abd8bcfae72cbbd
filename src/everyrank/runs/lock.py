"""Locks the folder of a run: rank 0 holds the lock while it trains.

The kernel releases its lock when the process ends in any way. Network file systems that support locks also keep other
hosts out. For file systems without locks, the file names the holder. If the holder is on this machine, its process is
looked up. If it is on another machine, the time of the file is watched, which the holder updates every few seconds.

A job whose ranks are restarted, maybe on other hosts, has its name in the file. A lock of an earlier start of the same
job is taken over at once, because its ranks had ended before the new ones started.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from everyrank.errors import UsageError
from everyrank.launch.host_info import host_name, pid_namespace

__all__ = ["LOCK", "hold"]

LOCK = "everyrank.lock"
_BEAT_SECONDS = 3.0
_SILENT_SECONDS = 20.0  # without an update of the file, the holder has ended
_POLL_SECONDS = 0.2
_HANDOVER_SECONDS = 120.0  # until a file server notices that the host of a lock is gone
_MAX_CLOCK_CHANGE_SECONDS = 10.0  # largest change of the clock while a process runs
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Holder(NamedTuple):
    """The process that holds the lock, as written in the file."""

    host: str
    space: str  # PID namespace
    pid: int
    started: float
    since: str
    job: str = ""  # name of an elastic job, the same in all its starts


@contextlib.contextmanager
def hold(run: Path, job: str = "") -> Generator[None]:
    """Lock the folder of a run while the block runs; create the folder if it does not exist.

    `job` is the name of an elastic job, the same in all its starts. Raises `UsageError` if another process holds the
    lock, and for a folder that cannot be written.
    """
    path = run / LOCK
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = _take(path, job)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another --out") from error
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(file, stop), name="everyrank-lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        stop.set()
        beating.join()
        with contextlib.suppress(OSError):
            if _is_here(file, path):
                path.unlink()  # before the lock is released; the next holder creates a new file
        os.close(file)


def _beat(file: int, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)


def _take(path: Path, job: str) -> int:
    """Take the lock; return the open file."""
    silent: set[_Holder] = set()
    deadline = time.monotonic() + _HANDOVER_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            is_locked = _lock(file)
            holder = _read(file)
            is_same_job = holder is not None and holder.job == job != ""
            if not is_locked or (holder is not None and _is_alive(holder)):
                if not is_same_job or time.monotonic() > deadline:
                    raise UsageError(_held_by(path, holder))
                time.sleep(_POLL_SECONDS)
                continue
            if holder is None or is_same_job or holder in silent or holder.space == pid_namespace():
                if _is_here(file, path):  # otherwise the holder has just ended and removed the file
                    _write(file, _this_process(job))
                    locked_file, file = file, -1
                    return locked_file
                continue
        finally:
            if file >= 0:
                os.close(file)  # releases the lock, because _beats opens and closes the file
        if _beats(path):
            raise UsageError(_held_by(path, holder))
        silent.add(holder)


def _lock(file: int) -> bool:
    """Take the kernel's lock; return whether no other process has it (True if the file system has no locks).

    It is a POSIX lock, which belongs to the process: forked loader workers do not inherit it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    return True


def _is_here(file: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _is_alive(holder: _Holder) -> bool:
    """Whether the holder runs on this machine. It compares start times, because process ids are reused."""
    if holder.space != pid_namespace():
        return False
    try:
        process = psutil.Process(holder.pid)
        is_same = abs(process.create_time() - holder.started) < _MAX_CLOCK_CHANGE_SECONDS
        return is_same and process.status() != psutil.STATUS_ZOMBIE and holder.pid != os.getpid()
    except psutil.Error:
        return False


def _beats(path: Path) -> bool:
    """Whether a holder on another machine still updates the file; does not compare clocks of two hosts."""
    first = _time_of(path)
    deadline = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = _time_of(path)
        if now is None:
            return False
        if now != first:
            return True
    return False


def _time_of(path: Path) -> int | None:
    """Return the modification time; None without a file. Opening the file makes NFS ask its server again."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _this_process(job: str = "") -> _Holder:
    started = psutil.Process().create_time()
    return _Holder(host_name(), pid_namespace(), os.getpid(), started, f"{datetime.now():%Y-%m-%d %H:%M:%S}", job)


def _write(file: int, holder: _Holder) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder._asdict()).encode(), 0)
    os.fsync(file)


def _read(file: int) -> _Holder | None:
    """Return the holder in the file; None if the file is empty or unreadable (then only the kernel's lock counts)."""
    try:
        content: Any = json.loads(os.pread(file, 1 << 16, 0))
        holder = _Holder(**content)
        is_valid = isinstance(holder.pid, int) and holder.pid > 0 and isinstance(holder.started, int | float)
        is_valid = is_valid and all(
            isinstance(text, str) for text in (holder.host, holder.space, holder.since, holder.job)
        )
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return holder if is_valid else None


def _held_by(path: Path, holder: _Holder | None) -> str:
    holder_text = "an unknown process"
    if holder is not None:
        holder_text = f"process {holder.pid} on {holder.host}, since {holder.since}"
        holder_text = "".join(letter if letter.isprintable() else "?" for letter in holder_text)
    return f"--out {path.parent}: another run uses it ({holder_text}); wait until it ends, or give another folder"
