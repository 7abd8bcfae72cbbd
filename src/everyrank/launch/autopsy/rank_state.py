"""The files that each rank writes while it runs, so that a hang can be explained. All ranks share their folder.

rank3.state    identity: process, host, start time
rank3.seen     stack of the main thread, at most half a second old; the last one of a stopped or dead rank
rank3.answer   stack, collectives and where the rank has spent the last minute, written on request and after a failure
rank3.stacks   stacks that `faulthandler` writes after a signal. It needs no interpreter, so it also works while C code
               blocks it, and in data loader workers, which are forks of the rank
request        all ranks answer when a new text is written to this file
hang.JOB       the autopsy that a rank has written because it waited for too long

A thread writes the files and sleeps most of the time.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from everyrank.errors import is_user_code
from everyrank.launch.host_info import host_name, pid_namespace, start_time

__all__ = [
    "FOLDER",
    "STACKS_SIGNAL",
    "RankState",
    "current_state",
    "forget_hang",
    "hang_report",
    "keep_state",
    "report_hang",
]

FOLDER = "autopsy"  # next to the logs of the ranks
# an unused signal; None on systems without real-time signals
STACKS_SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
_POLL_SECONDS = 0.25
_MAX_FRAMES = 100
_MAX_SAMPLES = 120  # stacks of the last minute
_MAX_LOCATIONS = 4  # in an answer: the most frequent ones
_CURRENT: list[RankState] = []


def current_state() -> RankState | None:
    """Return the `RankState` of this process; None if `keep_state` was not called."""
    return _CURRENT[-1] if _CURRENT else None


def keep_state(folder: Path, rank: int, size: int, job: str, is_unique: bool = True) -> RankState | None:
    """Start to write the state of this rank to the folder; None if it cannot be written.

    `job` distinguishes the ranks of this start from those of earlier ones. If it is not unique, they are distinguished
    by the times of their files.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = RankState(folder, rank, size, job, is_unique)
    except OSError:
        return None
    _CURRENT[:] = [state]
    return state


def report_hang(folder: Path, job: str, text: Callable[[], str]) -> str | None:
    """Write and return the text, unless a different rank of this job has already done so; then None."""
    path = folder / f"hang.{job}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return None
    with os.fdopen(file, "w") as opened:
        content = text()
        opened.write(content)
    return content


def hang_report(folder: Path, job: str) -> str:
    """Return the text that a rank of this job has written because it waited for too long; "" if there is none."""
    with contextlib.suppress(OSError), (folder / f"hang.{job}").open(errors="replace") as file:
        return file.read(10_000)
    return ""


def forget_hang(folder: Path, job: str) -> None:
    """Delete the text of `report_hang`, so that a rank can write another one."""
    with contextlib.suppress(OSError):
        (folder / f"hang.{job}").unlink(missing_ok=True)


class RankState:
    """Writes the files of this rank from a thread.

    is_started   whether the first update is done; --start-timeout applies before, --timeout after it
    calls        returns the collectives of this rank (`world.calls.recorded_calls`); set when a world is opened
    on_sample    called by the thread with each stack of the main thread, twice a second
    """

    def __init__(self, folder: Path, rank: int, size: int, job: str, is_unique: bool) -> None:
        self.folder, self.rank, self.size, self.job = folder, rank, size, job
        self.calls: Callable[[bool], dict[str, Any]] = lambda _: {}
        self.on_sample: Callable[[list[tuple[str, int, str]]], None] = lambda _: None
        self.is_started = self.has_ended = False
        self.samples: collections.deque[list[tuple[str, int, str]]] = collections.deque(maxlen=_MAX_SAMPLES)
        self.main = threading.main_thread().ident or 0
        forget_hang(folder, job)  # of an earlier start, which may have had the same job name
        for kind in ("answer", "seen"):
            self._path(kind).unlink(missing_ok=True)
        self.stacks = os.open(self._path("stacks"), os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)
        if not faulthandler.is_enabled():  # writes the stack when a library aborts
            faulthandler.enable(self.stacks)
        if STACKS_SIGNAL is not None:
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        self._write("state", self._identity(is_unique))
        self.seen = os.open(self._path("seen"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        self.answered = _read_request(folder)
        self.thread = threading.Thread(target=self._run, name="everyrank autopsy", daemon=True)
        self.thread.start()

    def _path(self, kind: str) -> Path:
        return self.folder / f"rank{self.rank}.{kind}"

    def _identity(self, is_unique: bool) -> dict[str, Any]:
        return {
            "job": self.job,
            "is_unique": is_unique,
            "rank": self.rank,
            "size": self.size,
            "host": host_name(),
            "space": pid_namespace(),
            "pid": os.getpid(),
            "began": start_time(os.getpid()),
            "main": self.main,
        }

    def _write(self, kind: str, row: dict[str, Any]) -> None:
        partial = self.folder / f"rank{self.rank}.{kind}.{threading.get_ident()}.partial"
        partial.write_text(json.dumps(row))
        partial.replace(self._path(kind))

    def _run(self) -> None:
        previous: Any = None
        for count in range(sys.maxsize):
            time.sleep(_POLL_SECONDS)
            if self.has_ended:
                return
            with contextlib.suppress(Exception):  # the disk may be full, or the folder deleted
                question = _read_request(self.folder)
                if question != self.answered:
                    self.answered = question
                    self.answer(question)
                if count % 2 == 0:
                    previous = self._write_stack(previous)
                    self.samples.append(previous["frames"])
                    self.on_sample(previous["frames"])

    def _write_stack(self, previous: Any) -> Any:
        """Write the stack of the main thread; if it has not changed, also the collectives, read only once."""
        frames = self.frames()
        row: dict[str, Any] = {"time": time.time(), "frames": frames}
        if previous is not None and frames == previous["frames"]:
            row["calls"] = previous.get("calls") or self.calls(False)
        content = json.dumps(row).encode()
        # One write, so that a concurrent reader finds valid JSON, or reads again.
        os.pwrite(self.seen, content + b" " * max(0, 8192 - len(content)), 0)
        os.ftruncate(self.seen, max(8192, len(content)))
        return row

    def write_stack_now(self) -> None:
        """Write the stack of the main thread at once."""
        self._write_stack(None)

    def frames(self) -> list[tuple[str, int, str]]:
        """Return (file, line, function) of the main thread, the innermost first."""
        return _frames(sys._current_frames().get(self.main))  # pyright: ignore[reportPrivateUsage]

    def answer(self, question: str, **fields: Any) -> None:
        """Write the stack of this rank and its collectives."""
        # After a failure (no question) write at once, because other ranks are about to fail.
        calls = self.calls(question != "")
        row = {"question": question, "time": time.time(), "frames": self.frames(), "calls": calls, **fields}
        if question:
            row |= {"num_samples": len(self.samples), "locations": _sampled_locations(list(self.samples))}
        if question == "" or not self.has_ended:  # the final answer stays
            self._write("answer", row)

    def fail(self, error: BaseException, message: str) -> None:
        """Write the final answer after an exception: its traceback."""
        self.has_ended = True
        frames: list[tuple[str, int, str]] = []
        trace = error.__traceback__
        while trace is not None:
            frames.insert(0, (trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
            trace = trace.tb_next
        with contextlib.suppress(Exception):
            self.answer("", frames=frames[:_MAX_FRAMES], raised=message)

    def end(self) -> None:
        """Write the final answer of a rank that has finished."""
        self.has_ended = True
        with contextlib.suppress(Exception):
            self.answer("", frames=[], ended=True)


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _sampled_locations(samples: list[list[tuple[str, int, str]]]) -> list[list[Any]]:
    """Return [how often, frames] of the locations of the main thread in user code, the most frequent ones first.

    The frames are those of the last sample, down to the innermost one of user code.
    """
    by_location: dict[tuple[str, int, str], list[Any]] = {}
    for frames in samples:
        depth = next((index for index, frame in enumerate(frames) if is_user_code(frame[0])), None)
        if depth is not None:
            row = by_location.setdefault(frames[depth], [0, []])
            row[0], row[1] = row[0] + 1, frames[: depth + 1]
    return sorted(by_location.values(), key=lambda row: -row[0])[:_MAX_LOCATIONS]


def _read_request(folder: Path) -> str:
    with contextlib.suppress(OSError), (folder / "request").open() as file:
        return file.read(100)
    return ""
