"""Every error that a user can meet, and the exit status each one means.

    EveryrankError                 4  the run failed
    ├── UsageError                 2  the call is wrong (also a ValueError)
    │   ├── LayoutError            2  a layout that cannot be read, or does not fit the processes
    │   └── WorkloadError          2  the workload is wrong, or its own code raised before the first update
    │       └── UnsupportedLayoutError  2  this workload cannot have this layout; another workload may
    ├── CannotRunError             3  asked for by name, and this machine cannot do it
    │   └── NoRoomError            3  an update takes more memory than there is
    ├── RankFailedError            4  a rank raised, died or never came
    ├── NotFiniteError             4  the loss became NaN or infinite
    ├── DivergedError              4  ranks that should hold the same no longer do (`--guard stop`)
    └── StoppedError             143  stopped after an update because a signal asked for it (138 for SIGUSR1)

Status 1 is no exception: it says that a check ran and found a difference. 130 and 143 are Ctrl-C and SIGTERM.

A message is one line: the value, the rule, the fix. Errors travel between processes as (kind, message).
"""

from __future__ import annotations

import functools
import re
import signal
import sys
import traceback
from pathlib import Path

__all__ = [
    "CannotRunError",
    "DivergedError",
    "EveryrankError",
    "LayoutError",
    "NoRoomError",
    "NotFiniteError",
    "RankFailedError",
    "StoppedError",
    "UnsupportedLayoutError",
    "UsageError",
    "WorkloadError",
    "describe",
    "is_own",
    "kind_named",
    "printable",
    "shortened",
    "signal_text",
]

CHECK_FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
_LONGEST = 1000  # characters of a message: a terminal full; the whole is in the log


class EveryrankError(Exception):
    """The root of the tree. `log` is the file with the frames of a person's own code, where there are any."""

    exit_status = 4

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class UsageError(EveryrankError, ValueError):
    """The call is wrong."""

    exit_status = 2


class LayoutError(UsageError):
    """A layout that cannot be read, or does not fit the processes."""


class WorkloadError(UsageError):
    """The workload is wrong, or its own code raised before the first update was done."""


class UnsupportedLayoutError(WorkloadError):
    """A layout that this workload cannot have: it does not say how, or it would be another training.

    Raised on every rank alike, so that a layout that nobody asked for by name can be left out.
    """


class CannotRunError(EveryrankError):
    """What was asked for by name cannot run here; the message says what it needs."""

    exit_status = 3


class NoRoomError(CannotRunError):
    """The model could be built, and an update takes more memory than there is: fewer samples at once may fit."""


class RankFailedError(EveryrankError):
    """A rank raised, died, or never came."""


class NotFiniteError(EveryrankError):
    """The loss became NaN or infinite; the message names the step and the first bad tensor."""


class DivergedError(EveryrankError):
    """Replicas are no longer equal; the message names the rank, the tensor and the updates in which it happened."""


class StoppedError(EveryrankError):
    """The training stopped after an update, as a signal asked; the message says what was saved, and how to go on."""

    exit_status = 143


_KINDS: dict[str, type[EveryrankError]] = {
    kind.__name__: kind
    for kind in (
        EveryrankError,
        UsageError,
        LayoutError,
        WorkloadError,
        UnsupportedLayoutError,
        CannotRunError,
        NoRoomError,
        RankFailedError,
        NotFiniteError,
        DivergedError,
        StoppedError,
    )
}


def kind_named(name: str) -> type[EveryrankError]:
    """The class called `name`; `RankFailedError` for a name that is none of ours."""
    return _KINDS.get(name, RankFailedError)


def describe(error: BaseException) -> str:
    """One line for any exception: `my_workload.py:12 in build_model: RuntimeError: ...`.

    The place is the innermost frame in a file of the person's own: outside this package, the standard library
    and installed packages. An error of our own is its message alone: it already says where.
    """
    if isinstance(error, EveryrankError):
        return str(error)
    if "Original Traceback" in str(error):
        return _describe_text(str(error))  # torch's data loader sends the traceback of its worker as text
    text = shortened(next((line.strip() for line in str(error).splitlines() if line.strip()), ""))
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {shortened(str(error.msg))}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_own(frame.filename)]
    if not user_frames and not frames:
        return summary
    frame = user_frames[-1] if user_frames else frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {summary}"


def _describe_text(text: str) -> str:
    """`describe` for a traceback that arrives as text; the last line says what was raised."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', text)
    summary = [line for line in text.splitlines() if re.match(r"\w[\w.]*(:|$)", line)][-1]
    user_frames = [frame for frame in frames if is_own(frame[0])] or frames
    return f"{Path(user_frames[-1][0]).name}:{user_frames[-1][1]} in {user_frames[-1][2]}: {shortened(summary)}"


@functools.lru_cache(maxsize=4096)
def is_own(filename: str) -> bool:
    """Whether a person wrote this file, as opposed to us, Python or an installed package."""
    path = Path(filename)
    inside = {"site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"}
    return not (
        path.is_relative_to(Path(__file__).parent) or filename.startswith("<") or inside.intersection(path.parts)
    )


def shortened(text: str) -> str:
    """A message that fits a screen: of one that is longer the beginning and the end, and how long it was."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 4 :]}"


def printable(text: str) -> str:
    """Without control characters: what comes from elsewhere must not steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def signal_text(number: int) -> str:
    """`SIGKILL`, with what it often means."""
    name = signal.Signals(number).name
    return f"{name} (often out of memory)" if name == "SIGKILL" else name
