"""One run at a time in a folder: rank 0 holds it while it trains.

The kernel's lock on the file ends with the process, however that ends, and network file systems that carry such locks
hold off other hosts too. Where one does not, the file itself says who holds the folder: on this machine the process is
looked for; of one elsewhere the file's time is watched, which its holder sets anew every few seconds.

A job whose ranks are started again, on other hosts perhaps, has a name in the file: what an earlier start of the same
job has left is taken over without watching, because its ranks were ended before new ones could meet.
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
_SILENT_SECONDS = 20.0  # without a beat, its holder has ended
_LOOK_SECONDS = 0.2
_HANDOVER_SECONDS = 120.0  # until a file server knows that a host is gone which held a lock
_CLOCK_SECONDS = 10.0  # what a clock may be set by while a process runs
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Holder(NamedTuple):
    """A process of some machine, as it stands in the file."""

    host: str
    space: str  # in which processes know each other by number
    pid: int
    started: float
    since: str
    job: str = ""  # of ranks that are started again: what is the same in all starts


@contextlib.contextmanager
def hold(run: Path, job: str = "") -> Generator[None]:
    """Hold the folder of a run, which is made where it is not there.

    `job` is what all starts of one elastic job have in common.
    Raises `UsageError` that names who holds it, and for a folder that cannot be written.
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
                path.unlink()  # before the lock is let go: who comes next makes a new one
        os.close(file)


def _beat(file: int, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)


def _take(path: Path, job: str) -> int:
    """The open file, which is ours now."""
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
                time.sleep(_LOOK_SECONDS)
                continue
            if holder is None or is_same_job or holder in silent or holder.space == pid_namespace():
                if _is_here(file, path):  # else its holder has just ended, and taken it away
                    _write(file, _myself(job))
                    locked_file, file = file, -1
                    return locked_file
                continue
        finally:
            if file >= 0:
                os.close(file)  # and with it the lock: the watch below opens and closes the file
        if _beats(path):
            raise UsageError(_held_by(path, holder))
        silent.add(holder)


def _lock(file: int) -> bool:
    """Take the kernel's lock, where there are such locks; whether nobody else has it.

    It is one of processes and not of files: workers of a data loader, forked from this one, do not inherit it.
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
    """Whether it is a process that runs here; False of one elsewhere. A number may belong to another process by now."""
    if holder.space != pid_namespace():
        return False
    try:
        process = psutil.Process(holder.pid)
        is_same = abs(process.create_time() - holder.started) < _CLOCK_SECONDS
        return is_same and process.status() != psutil.STATUS_ZOMBIE and holder.pid != os.getpid()
    except psutil.Error:
        return False


def _beats(path: Path) -> bool:
    """Watch a lock whose holder is elsewhere: whether it lives. Clocks are not compared, those of two hosts differ."""
    first = _time_of(path)
    deadline = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = _time_of(path)
        if now is None:
            return False
        if now != first:
            return True
    return False


def _time_of(path: Path) -> int | None:
    """When the file was last written; None without one. Opening it anew is what asks a file server again."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _myself(job: str = "") -> _Holder:
    started = psutil.Process().create_time()
    return _Holder(host_name(), pid_namespace(), os.getpid(), started, f"{datetime.now():%Y-%m-%d %H:%M:%S}", job)


def _write(file: int, holder: _Holder) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder._asdict()).encode(), 0)
    os.fsync(file)


def _read(file: int) -> _Holder | None:
    """Who stands in the file; None where nobody does, or it cannot be read: then the kernel's lock alone counts."""
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
    who = "a process that cannot be named"
    if holder is not None:
        who = f"process {holder.pid} on {holder.host}, since {holder.since}"
        who = "".join(letter if letter.isprintable() else "?" for letter in who)
    return f"--out {path.parent}: another run holds it ({who}); wait for its end, or give another folder"
