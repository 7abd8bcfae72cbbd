"""What is known of every rank of a folder: its own answer, else its stack from outside, and what its process does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from everyrank.launch.autopsy.rank_state import STACKS_SIGNAL
from everyrank.launch.host_info import pid_namespace, start_time

__all__ = ["Frame", "RankView", "look_at_ranks"]

Frame = tuple[str, int, str]  # file, line, function
_LARGEST = 1 << 22  # bytes of a file that is read: an answer has some thousands
_STACK_SECONDS = 1.0  # until the stacks that a signal asks for are written
_PAUSE_SECONDS = 0.05
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n?)*)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass
class RankView:
    """What is known of a rank.

    state     of its process: running, sleeping, stopped, "waiting for a disk", gone; "" where it is on another machine
    busy      CPU seconds a second, in the moment of the look
    frames    of its main thread, the innermost first
    age       seconds since it stood there, where that is only the last that was seen of it; 0: it stands there now
    aborted   whether a library has ended it, in C (SIGABRT, SIGSEGV): `frames` says where it stood
    calls     {"groups": {name: ranks}, "calls": [...]} as `world.calls.recorded_calls` returns it; {} where unknown
    raised    the message of the error with which it ended
    ended     whether its work is done
    workers   (process, frames) of its children that answer: workers of a data loader
    """

    rank: int
    size: int
    host: str
    pid: int
    state: str = ""
    busy: float = 0.0
    frames: list[Frame] = field(default_factory=list[Frame])
    age: float = 0.0
    calls: dict[str, Any] = field(default_factory=dict[str, Any])
    aborted: bool = False
    raised: str = ""
    ended: bool = False
    workers: list[tuple[int, list[Frame]]] = field(default_factory=list[tuple[int, list[Frame]]])


def look_at_ranks(folder: Path, patience_seconds: float) -> list[RankView]:
    """All ranks that leave their state in this folder, by rank; of several starts those of the newest."""
    whos = _newest_job([row for path in folder.glob("rank*.state") if (row := _read(path))])
    if not whos:
        return []
    question = _ask(folder)
    processes = {who["rank"]: _process(who) for who in whos}
    before = {rank: _cpu_seconds(process) for rank, process in processes.items()}
    begun = time.monotonic()
    # a rank that failed, or was already asked by another, has answered; one that is stopped or gone never will
    while time.monotonic() < begun + patience_seconds and any(
        not _has_answered(folder, who, question) and _may_answer(who, processes[who["rank"]]) for who in whos
    ):
        time.sleep(_PAUSE_SECONDS)
    if time.monotonic() < begun + 4 * _PAUSE_SECONDS:
        time.sleep(4 * _PAUSE_SECONDS)  # a process computes, or it does not: that takes a while to see
    seconds = time.monotonic() - begun
    views: list[RankView] = []
    for who in sorted(whos, key=lambda who: who["rank"]):
        rank, process = who["rank"], processes[who["rank"]]
        busy = max(0.0, _cpu_seconds(process) - before[rank]) / seconds
        views.append(_view(folder, who, process, busy))
    return views


def _newest_job(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    newest = max(rows, key=lambda row: row["began"])
    return [row for row in rows if (row["job"], row["size"]) == (newest["job"], newest["size"])]


def _read(path: Path) -> dict[str, Any]:
    """A file of a rank; {} where there is none, or nothing like it. A folder may come from anywhere."""
    for _ in range(3):
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST:
                return {}
            row: Any = json.loads(path.read_text(errors="replace"))
        except OSError:
            return {}
        except (ValueError, RecursionError):
            time.sleep(0.01)  # it is being written
            continue
        return row if isinstance(row, dict) and _is_sound(row) else {}
    return {}


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("job", "host", "space", "question", "raised"), str),
    **dict.fromkeys(("rank", "size", "pid", "main"), int),
    **dict.fromkeys(("began", "time"), (int, float)),
    "frames": list,
    "calls": dict,
    "ended": bool,
}


def _is_sound(row: dict[str, Any]) -> bool:
    """Whether everything in it is of the kind that a rank writes."""
    needed = ("job", "rank", "size", "host", "space", "pid", "began", "main") if "job" in row else ("time", "frames")
    return (
        all(name in row for name in needed)
        and all(name in _KINDS and _is_of_kind(value, _KINDS[name]) for name, value in row.items())
        and all(0 <= row.get(name, 0) < _LARGEST for name in ("rank", "size"))
        and all(_is_frame(frame) for frame in row.get("frames", []))
        and _are_calls(row.get("calls", {}))
    )


def _is_of_kind(value: object, kind: type | tuple[type, ...]) -> bool:
    """Whether a value is of a kind; True is no number here, and neither are NaN and infinity."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


def _is_frame(frame: object) -> bool:
    """[file, line, function]."""
    return isinstance(frame, list) and [type(part) for part in frame] == [str, int, str]  # pyright: ignore


def _are_calls(calls: dict[str, Any]) -> bool:
    """Whether it is what `world.calls.recorded_calls` returns: groups with their ranks, and rows of nine."""
    groups, rows = calls.get("groups", {}), calls.get("calls", [])
    return (
        isinstance(groups, dict)
        and all(isinstance(ranks, list) and all(type(rank) is int for rank in ranks) for ranks in groups.values())  # pyright: ignore
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(_CALL) + 1 and _is_call(row) for row in rows)  # pyright: ignore
    )


_CALL: tuple[type | tuple[type, ...], ...] = (str, int, str, int, str, bool, bool, (int, float))


def _is_call(row: list[Any]) -> bool:
    """One row: group, number, operation, elements, dtype, is it done, is it a message, when it began, its frame."""
    *values, frame = row
    return all(map(_is_of_kind, values, _CALL)) and (frame is None or _is_frame(frame))


def _ask(folder: Path) -> str:
    """Put the question; the word in it by which answers to it are known."""
    question = uuid.uuid4().hex
    with contextlib.suppress(OSError):  # a folder of somebody else: what is there is read
        (folder / f"request.{question}").write_text(question)
        (folder / f"request.{question}").replace(folder / "request")
    return question


def _process(who: dict[str, Any]) -> psutil.Process | None:
    """Its process, where it is on this machine and still the same."""
    if who["space"] != pid_namespace() or who["pid"] <= 0:
        return None
    with contextlib.suppress(psutil.Error, OverflowError):
        process = psutil.Process(who["pid"])
        if start_time(process.pid) == who["began"]:
            return process
    return None


def _cpu_seconds(process: psutil.Process | None) -> float:
    with contextlib.suppress(psutil.Error):
        if process is not None:
            times = process.cpu_times()
            return times.user + times.system
    return 0.0


_STATES = {
    **dict.fromkeys((psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP), "stopped"),
    **dict.fromkeys((psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD), "gone"),
    psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    psutil.STATUS_RUNNING: "running",
}


def _state(who: dict[str, Any], process: psutil.Process | None) -> str:
    if who["space"] != pid_namespace():
        return ""
    with contextlib.suppress(psutil.Error):
        if process is not None:
            return _STATES.get(process.status(), "sleeping")
    return "gone"


def _may_answer(who: dict[str, Any], process: psutil.Process | None) -> bool:
    return _state(who, process) not in ("stopped", "gone")


def _has_answered(folder: Path, who: dict[str, Any], question: str) -> bool:
    row = _read(folder / f"rank{who['rank']}.answer")
    return bool(row) and (row.get("question") == question or "raised" in row or "ended" in row)


def _view(folder: Path, who: dict[str, Any], process: psutil.Process | None, busy: float) -> RankView:
    rank = who["rank"]
    view = RankView(rank, who["size"], who["host"], who["pid"], _state(who, process), busy)
    answer, seen = _read(folder / f"rank{rank}.answer"), _read(folder / f"rank{rank}.seen")
    is_new = "raised" in answer or "ended" in answer or answer.get("time", 0.0) > seen.get("time", 0.0) - 1.0
    row = answer if answer and is_new else seen
    view.raised, view.ended = answer.get("raised", ""), answer.get("ended", False)
    view.calls = row.get("calls", {})
    view.frames = [(file, line, function) for file, line, function in row.get("frames", [])]
    is_said = row is answer and bool(answer)
    if not is_said and view.state == "gone" and (found := _of_abort(folder, who)):
        view.frames, view.aborted = found, True
    elif not is_said and process is not None and view.state != "stopped":
        # the interpreter does not run: C code holds it
        view.frames = _stack(folder, who, process.pid) or view.frames
    elif not is_said and seen:
        view.age = max(0.1, time.time() - seen["time"])
    if process is not None and view.state not in ("gone", "stopped"):
        with contextlib.suppress(psutil.Error):
            children = process.children(recursive=True)
            found = [(child.pid, _stack(folder, who, child.pid)) for child in children[:8]]
            view.workers = [(pid, frames) for pid, frames in found if frames]
    return view


def _stack(folder: Path, who: dict[str, Any], pid: int) -> list[Frame]:
    """The stack of a process that answers the signal; [] of one that does not, which is sent none."""
    path = folder / f"rank{who['rank']}.stacks"
    # a pipe that nobody writes into would be waited for without end
    if STACKS_SIGNAL is None or not path.is_file() or not _catches(pid, STACKS_SIGNAL):
        return []
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with path.open("rb") as file:
                file.seek(size)
                more = file.read(_LARGEST).decode(errors="replace")
            if more and more == text:
                break
            text = more
        return _main_thread(text, who)
    return []


def _main_thread(text: str, who: dict[str, Any]) -> list[Frame]:
    """Its frames, in what `faulthandler` has written of all threads."""
    blocks = {int(thread, 16): frames for thread, frames in _BLOCK.findall(text)}
    if not blocks:
        return []
    own = blocks.get(who["main"]) or list(blocks.values())[-1]
    return [(file, int(line), function) for file, line, function in _LINE.findall(own)]


def _of_abort(folder: Path, who: dict[str, Any]) -> list[Frame]:
    """Where a process stood that a library has ended; [] of one that ended in another way."""
    path = folder / f"rank{who['rank']}.stacks"
    if not path.is_file():
        return []
    with contextlib.suppress(OSError), path.open("rb") as file:
        _, fatal, text = file.read(_LARGEST).decode(errors="replace").rpartition("Fatal Python error:")
        return _main_thread(text, who) if fatal else []
    return []


def _catches(pid: int, number: int) -> bool:
    """Whether a signal would not end this process: it has said what to do then."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False
