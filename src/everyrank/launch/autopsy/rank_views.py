"""Collect the state of each rank: its answer, or else its stack read from outside, and its process state."""

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

__all__ = ["Frame", "RankView", "last_frames", "read_rank_views"]

Frame = tuple[str, int, str]  # file, line, function
_MAX_BYTES = 1 << 22  # size limit of a file; an answer has a few thousand bytes
_STACK_SECONDS = 1.0  # longest wait for the stacks after the signal
_PAUSE_SECONDS = 0.05
_ABORT_SECONDS = 2.0  # a rank that writes after this time was not aborted
_START_SECONDS = 10.0  # the ranks of one start begin within this time
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n?)*)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass
class RankView:
    """The state of one rank.

    state        of its process: running, sleeping, stopped, "waiting for a disk", gone; "" on another machine
    busy         CPU seconds per second while it was observed
    frames       stack of its main thread, innermost first
    age          seconds since `frames` were recorded, if they may be outdated; 0: they are current
    aborted      whether a library ended it in C (SIGABRT, SIGSEGV); `frames` is the stack at that time
    calls        {"groups": {name: ranks}, "calls": [...]} as `world.calls.recorded_calls` returns it; {} if unknown
    num_samples  how many stacks of the last minute were recorded
    locations    (how often, frames) of the most frequent locations in user code among them
    raised       the message of the error with which it ended
    ended        whether its work is done
    workers      (process, frames) of its child processes that respond: data loader workers
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
    num_samples: int = 0
    locations: list[tuple[int, list[Frame]]] = field(default_factory=list[tuple[int, list[Frame]]])
    aborted: bool = False
    raised: str = ""
    ended: bool = False
    workers: list[tuple[int, list[Frame]]] = field(default_factory=list[tuple[int, list[Frame]]])


def read_rank_views(folder: Path, timeout_seconds: float) -> list[RankView]:
    """Return the ranks that write their state to this folder, by rank; after several starts, those of the newest."""
    identities = _newest_job(folder, [row for path in folder.glob("rank*.state") if (row := _read(path))])
    if not identities:
        return []
    question = _write_request(folder)
    processes = {identity["rank"]: _process(identity) for identity in identities}
    cpu_before = {rank: _cpu_seconds(process) for rank, process in processes.items()}
    started_at = time.monotonic()
    # A rank that failed has answered already. A rank that is stopped or gone cannot answer.
    while time.monotonic() < started_at + timeout_seconds and any(
        not _has_answered(folder, identity, question) and _can_answer(identity, processes[identity["rank"]])
        for identity in identities
    ):
        time.sleep(_PAUSE_SECONDS)
    if time.monotonic() < started_at + 4 * _PAUSE_SECONDS:
        time.sleep(4 * _PAUSE_SECONDS)  # long enough to measure CPU use
    seconds = time.monotonic() - started_at
    views: list[RankView] = []
    for identity in sorted(identities, key=lambda identity: identity["rank"]):
        rank, process = identity["rank"], processes[identity["rank"]]
        busy = max(0.0, _cpu_seconds(process) - cpu_before[rank]) / seconds
        views.append(_view(folder, identity, process, busy))
    return views


def _newest_job(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks of the newest start, by the times of their files: clocks of different hosts differ."""
    if not rows:
        return []
    newest = max(rows, key=lambda row: _last_write(folder, row, "state"))
    rows = [row for row in rows if (row["job"], row["size"]) == (newest["job"], newest["size"])]
    if newest.get("is_unique", True):
        return list(rows)
    # earlier starts had the same job name; a rank of this start writes after its start, if it is not blocked
    first_write = _last_write(folder, newest, "state") - _START_SECONDS
    return [row for row in rows if _last_write(folder, row, "*") >= first_write or _process(row) is not None]


def _last_write(folder: Path, identity: dict[str, Any], kind: str) -> float:
    """Return when a file of a rank was last written, by the clock of its file system; 0 if there is none."""
    times = [0.0]
    for path in folder.glob(f"rank{identity['rank']}.{kind}"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a rank's file; {} if it is missing or malformed. The folder is not trusted."""
    for _ in range(3):
        try:
            if not path.is_file() or path.stat().st_size > _MAX_BYTES:
                return {}
            row: Any = json.loads(path.read_text(errors="replace"))
        except OSError:
            return {}
        except (ValueError, RecursionError):
            time.sleep(0.01)  # it is being written
            continue
        return row if isinstance(row, dict) and _is_valid(row) else {}
    return {}


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("job", "host", "space", "question", "raised"), str),
    **dict.fromkeys(("rank", "size", "pid", "main", "num_samples"), int),
    **dict.fromkeys(("began", "time"), (int, float)),
    "frames": list,
    "locations": list,
    "calls": dict,
    "ended": bool,
    "is_unique": bool,
}


def _is_valid(row: dict[str, Any]) -> bool:
    """Whether all fields have the types that a rank writes."""
    required_fields = (
        ("job", "rank", "size", "host", "space", "pid", "began", "main") if "job" in row else ("time", "frames")
    )
    return (
        all(name in row for name in required_fields)
        and all(name in _KINDS and _has_type(value, _KINDS[name]) for name, value in row.items())
        and all(0 <= row.get(name, 0) < _MAX_BYTES for name in ("rank", "size"))
        and all(_is_frame(frame) for frame in row.get("frames", []))
        and all(_is_stack_count(entry) for entry in row.get("locations", []))
        and _are_calls(row.get("calls", {}))
    )


def _has_type(value: object, kind: type | tuple[type, ...]) -> bool:
    """Whether a value has this type. True, NaN and infinity do not count as numbers."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


def _is_frame(frame: object) -> bool:
    """[file, line, function]."""
    return isinstance(frame, list) and [type(value) for value in frame] == [str, int, str]  # pyright: ignore


def _is_stack_count(entry: object) -> bool:
    """[how often, frames]."""
    if not isinstance(entry, list) or len(entry) != 2:  # pyright: ignore
        return False
    count, frames = entry  # pyright: ignore
    return type(count) is int and isinstance(frames, list) and all(_is_frame(frame) for frame in frames)  # pyright: ignore


def _are_calls(calls: dict[str, Any]) -> bool:
    """Whether this is a result of `world.calls.recorded_calls`: groups with their ranks, and rows of nine values."""
    groups, rows = calls.get("groups", {}), calls.get("calls", [])
    return (
        isinstance(groups, dict)
        and all(isinstance(ranks, list) and all(type(rank) is int for rank in ranks) for ranks in groups.values())  # pyright: ignore
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(_CALL) + 1 and _is_call(row) for row in rows)  # pyright: ignore
    )


_CALL: tuple[type | tuple[type, ...], ...] = (str, int, str, int, str, bool, bool, (int, float))


def _is_call(row: list[Any]) -> bool:
    """One row: group, number, operation, elements, dtype, is done, is a message, start time, stack frame."""
    *values, frame = row
    return all(map(_has_type, values, _CALL)) and (frame is None or _is_frame(frame))


def _write_request(folder: Path) -> str:
    """Ask all ranks for an answer. Returns the random text that their answers will contain."""
    question = uuid.uuid4().hex
    with contextlib.suppress(OSError):  # a folder without write permission: existing files are read
        (folder / f"request.{question}").write_text(question)
        (folder / f"request.{question}").replace(folder / "request")
    return question


def _process(identity: dict[str, Any]) -> psutil.Process | None:
    """Return the process of a rank; None on a different machine, or if its process id was reused."""
    if identity["space"] != pid_namespace() or identity["pid"] <= 0:
        return None
    with contextlib.suppress(psutil.Error, OverflowError):
        process = psutil.Process(identity["pid"])
        if start_time(process.pid) == identity["began"]:
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


def _state(identity: dict[str, Any], process: psutil.Process | None) -> str:
    if identity["space"] != pid_namespace():
        return ""
    with contextlib.suppress(psutil.Error):
        if process is not None:
            return _STATES.get(process.status(), "sleeping")
    return "gone"


def _can_answer(identity: dict[str, Any], process: psutil.Process | None) -> bool:
    return _state(identity, process) not in ("stopped", "gone")


def _has_answered(folder: Path, identity: dict[str, Any], question: str) -> bool:
    row = _read(folder / f"rank{identity['rank']}.answer")
    return bool(row) and (row.get("question") == question or "raised" in row or "ended" in row)


def _view(folder: Path, identity: dict[str, Any], process: psutil.Process | None, busy: float) -> RankView:
    rank = identity["rank"]
    view = RankView(rank, identity["size"], identity["host"], identity["pid"], _state(identity, process), busy)
    answer, seen = _read(folder / f"rank{rank}.answer"), _read(folder / f"rank{rank}.seen")
    is_answer_newer = "raised" in answer or "ended" in answer or answer.get("time", 0.0) > seen.get("time", 0.0) - 1.0
    row = answer if answer and is_answer_newer else seen
    view.raised, view.ended = answer.get("raised", ""), answer.get("ended", False)
    view.calls = row.get("calls", {})
    view.frames = [(file, line, function) for file, line, function in row.get("frames", [])]
    view.num_samples = row.get("num_samples", 0)
    view.locations = [(count, [(*frame,) for frame in frames]) for count, frames in row.get("locations", [])]
    has_answer = row is answer and bool(answer)
    # on another host its process is unknown, but the stack that it wrote when it was aborted is in the folder
    if not has_answer and view.state in ("gone", "") and (frames := _frames_at_abort(folder, identity)):
        view.frames, view.aborted = frames, True
    elif not has_answer and process is not None and view.state != "stopped":
        # the interpreter is blocked by C code
        view.frames = _stack(folder, identity, process.pid) or view.frames
    elif not has_answer and seen:
        view.age = max(0.1, time.time() - seen["time"])
    if process is not None and view.state not in ("gone", "stopped"):
        with contextlib.suppress(psutil.Error):
            children = process.children(recursive=True)
            stacks = [(child.pid, _stack(folder, identity, child.pid)) for child in children[:8]]
            view.workers = [(pid, frames) for pid, frames in stacks if frames]
    return view


def last_frames(folder: Path, rank: int) -> tuple[list[Frame], float]:
    """The last known stack of a rank that has died, innermost first, and when it was recorded ([], 0.0 if unknown).

    The time is that of its host's clock; infinity for the stack at the time when a library aborted the process.
    """
    identity, seen = _read(folder / f"rank{rank}.state"), _read(folder / f"rank{rank}.seen")
    if not identity:
        return [], 0.0
    if frames := _frames_at_abort(folder, identity):
        return frames, math.inf
    return [(file, line, function) for file, line, function in seen.get("frames", [])], seen.get("time", 0.0)


def _stack(folder: Path, identity: dict[str, Any], pid: int) -> list[Frame]:
    """Signal a process and return its stack; [] if it does not handle the signal, which would end it."""
    path = folder / f"rank{identity['rank']}.stacks"
    # reading a pipe without a writer would block
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
                new_text = file.read(_MAX_BYTES).decode(errors="replace")
            if new_text and new_text == text:
                break
            text = new_text
        return _main_thread(text, identity)
    return []


def _main_thread(text: str, identity: dict[str, Any]) -> list[Frame]:
    """Return the frames of the main thread in the output of `faulthandler`."""
    blocks = {int(thread, 16): frames for thread, frames in _BLOCK.findall(text)}
    if not blocks:
        return []
    block = blocks.get(identity["main"]) or list(blocks.values())[-1]
    return [(file, int(line), function) for file, line, function in _LINE.findall(block)]


def _frames_at_abort(folder: Path, identity: dict[str, Any]) -> list[Frame]:
    """Return the stack of a process when a library aborted it; [] if it ended differently.

    A data loader worker that is aborted writes its stack to the same file. Its rank continues.
    """
    path = folder / f"rank{identity['rank']}.stacks"
    if not path.is_file():
        return []
    if _last_write(folder, identity, "seen") > _last_write(folder, identity, "stacks") + _ABORT_SECONDS:
        return []
    with contextlib.suppress(OSError), path.open("rb") as file:
        _, fatal, text = file.read(_MAX_BYTES).decode(errors="replace").rpartition("Fatal Python error:")
        return _main_thread(text, identity) if fatal else []
    return []


def _catches(pid: int, number: int) -> bool:
    """Whether this process has a handler for the signal, which would end it otherwise."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False
