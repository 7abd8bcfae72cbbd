"""What each rank leaves while it runs, for the case that it hangs: files in a folder that the ranks share.

rank3.state    who it is: process, host, when it began
rank3.seen     where its main thread stood half a second ago; the last that is known of one that is stopped or dead
rank3.answer   where it stands and which collectives it has called: when somebody asks, and when it fails
rank3.stacks   the stacks that `faulthandler` writes on a signal: without the interpreter, so also where C code never
               lets go of it, and in data loader workers, which are forks of the rank
request        the question: whoever writes a new word into it is answered

A thread writes them; between two looks it sleeps.
"""

from __future__ import annotations

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

from everyrank.launch.host_info import host_name, pid_namespace, start_time

__all__ = ["FOLDER", "STACKS_SIGNAL", "RankState", "current_state", "keep_state"]

FOLDER = "autopsy"  # beside the logs of the ranks
# one that nobody else uses; None on systems without such signals
STACKS_SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
_LOOK_SECONDS = 0.25
_MOST_FRAMES = 100
_KEPT: list[RankState] = []


def current_state() -> RankState | None:
    """That of this process, where it keeps one."""
    return _KEPT[-1] if _KEPT else None


def keep_state(folder: Path, rank: int, size: int, job: str) -> RankState | None:
    """Begin to leave the state of this rank there; None where the folder cannot be written.

    `job` tells the ranks of one start from those that left files there before.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = RankState(folder, rank, size, job)
    except OSError:
        return None
    _KEPT[:] = [state]
    return state


class RankState:
    """What this rank leaves.

    is_started   whether the first update is done: from then on the longest wait is --timeout, before --start-timeout
    calls        who knows the collectives that this rank has called (`world.calls.recorded_calls`); none before a
                 world is open
    """

    def __init__(self, folder: Path, rank: int, size: int, job: str) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.calls: Callable[[bool], dict[str, Any]] = lambda _: {}
        self.is_started = self.has_ended = False
        self.main = threading.main_thread().ident or 0
        for kind in ("answer", "seen"):
            self._path(kind).unlink(missing_ok=True)
        self.stacks = os.open(self._path("stacks"), os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)
        if not faulthandler.is_enabled():  # of a library that aborts, where it stood
            faulthandler.enable(self.stacks)
        if STACKS_SIGNAL is not None:
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        self._write("state", self._who(job))
        self.seen = os.open(self._path("seen"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        self.answered = _question(folder)
        self.thread = threading.Thread(target=self._attend, name="everyrank autopsy", daemon=True)
        self.thread.start()

    def _path(self, kind: str) -> Path:
        return self.folder / f"rank{self.rank}.{kind}"

    def _who(self, job: str) -> dict[str, Any]:
        return {
            "job": job,
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

    def _attend(self) -> None:
        before: Any = None
        for looks in range(sys.maxsize):
            time.sleep(_LOOK_SECONDS)
            if self.has_ended:
                return
            with contextlib.suppress(Exception):  # a disk that is full, a folder that was taken away
                asked = _question(self.folder)
                if asked != self.answered:
                    self.answered = asked
                    self.answer(asked)
                if looks % 2 == 0:
                    before = self._note_where(before)

    def _note_where(self, before: Any) -> Any:
        """Write down where the main thread stands; where that is what it was, once what it has called, too."""
        frames = self.frames()
        row: dict[str, Any] = {"time": time.time(), "frames": frames}
        if before is not None and frames == before["frames"]:
            row["calls"] = before.get("calls") or self.calls(False)
        content = json.dumps(row).encode()
        # in one write: whoever reads at this moment finds JSON, or reads again
        os.pwrite(self.seen, content + b" " * max(0, 8192 - len(content)), 0)
        os.ftruncate(self.seen, max(8192, len(content)))
        return row

    def frames(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of the main thread, the innermost first."""
        return _frames(sys._current_frames().get(self.main))  # pyright: ignore[reportPrivateUsage]

    def answer(self, question: str, **more: Any) -> None:
        """Say where this rank stands, and what it has called."""
        # who has failed says what is known at once: others are about to
        calls = self.calls(question != "")
        row = {"question": question, "time": time.time(), "frames": self.frames(), "calls": calls, **more}
        if question == "" or not self.has_ended:  # the last words stay
            self._write("answer", row)

    def fail(self, error: BaseException, message: str) -> None:
        """The last words of a rank that has raised: where it did."""
        self.has_ended = True
        frames: list[tuple[str, int, str]] = []
        trace = error.__traceback__
        while trace is not None:
            frames.insert(0, (trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
            trace = trace.tb_next
        with contextlib.suppress(Exception):
            self.answer("", frames=frames[:_MOST_FRAMES], raised=message)

    def end(self) -> None:
        """The last words of a rank whose work is done."""
        self.has_ended = True
        with contextlib.suppress(Exception):
            self.answer("", frames=[], ended=True)


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _question(folder: Path) -> str:
    with contextlib.suppress(OSError), (folder / "request").open() as file:
        return file.read(100)
    return ""
