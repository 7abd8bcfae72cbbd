"""Every error that a user can meet, and the exit status each one means.

    EveryrankError                 4  the run failed
    ├── UsageError                 2  the call is wrong (also a ValueError)
    │   ├── LayoutError            2  a layout that cannot be read, or does not fit the processes
    │   └── WorkloadError          2  the workload is wrong, or its own code raised before the first update
    │       └── UnsupportedLayoutError  2  this layout does not support this workload
    ├── CannotRunError             3  requested, but not available on this machine
    │   └── OutOfMemoryError       3  an update takes more memory than there is
    ├── RankFailedError            4  a rank raised an error, died or never connected
    ├── NotFiniteError             4  the loss became NaN or infinite
    ├── DivergedError              4  replicas are no longer equal (`--guard stop`)
    └── StoppedError             143  stopped after an update because a signal asked for it (138 for SIGUSR1)

Status 1 has no exception: a check ran and found a difference. 130 and 143 are Ctrl-C and SIGTERM.

A message is one line: the value, the rule, the fix. Errors travel between processes as (kind, message).
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import traceback
from pathlib import Path

__all__ = [
    "LOCATION_PATTERN",
    "CannotRunError",
    "DivergedError",
    "EveryrankError",
    "LayoutError",
    "NotFiniteError",
    "OutOfMemoryError",
    "RankFailedError",
    "StoppedError",
    "UnsupportedLayoutError",
    "UsageError",
    "WorkloadError",
    "describe",
    "is_user_code",
    "kind_named",
    "printable",
    "shortened",
    "signal_text",
]

CHECK_FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
_LONGEST = 1000  # longest message in characters; the log has the whole
_PACKAGE = str(Path(__file__).parent) + os.sep
_FRAME = re.compile(r'\s*File "(.+?)", line (\d+), in (\S+)')


class EveryrankError(Exception):
    """Base class of all errors. The message is one line.

    Attributes:
        exit_status: Exit status of the command line for this kind of error.
        log: File with the traceback of user code, if there is one.

    Examples:
        >>> from everyrank import EveryrankError, parse_layout
        >>> try:
        ...     parse_layout("ddp:accumulate=0")
        ... except EveryrankError as error:
        ...     print(error, error.exit_status)
        layout ddp:accumulate=0: accumulate=0: give at least 1 micro-batch 2
    """

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
    """A layout that does not support this workload, or that would not be equivalent to one device.

    Raised on every rank, so that a layout that was not requested by name can be skipped.
    """


class CannotRunError(EveryrankError):
    """A requested device, backend or package is not available; the message names what is missing."""

    exit_status = 3


class OutOfMemoryError(CannotRunError):
    """Out of memory in an update; the model itself fits. A smaller micro-batch may fit."""


class RankFailedError(EveryrankError):
    """A rank raised an error, died, or never connected."""


class NotFiniteError(EveryrankError):
    """The loss became NaN or infinite; the message names the step and the first bad tensor."""


class DivergedError(EveryrankError):
    """Replicas are no longer equal; the message names the rank, the tensor and the updates in which it happened."""


class StoppedError(EveryrankError):
    """The training stopped after a signal; the message names the checkpoint and the command to resume."""

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
        OutOfMemoryError,
        RankFailedError,
        NotFiniteError,
        DivergedError,
        StoppedError,
    )
}


def kind_named(name: str) -> type[EveryrankError]:
    """Return the error class called `name`, `RankFailedError` for an unknown name."""
    return _KINDS.get(name, RankFailedError)


LOCATION_PATTERN = r"[^:\s][^:\n]*:\d+ in \S+: "
"""Regular expression of the location in the result of `describe`. The name of the file may have spaces."""


def describe(error: BaseException) -> str:
    """Return one line for any exception: `my_workload.py:12 in build_model: RuntimeError: ...`.

    The location is the innermost frame in user code: outside this package, the standard library and installed
    packages. For an `EveryrankError` it is only the message.
    """
    if isinstance(error, EveryrankError):
        return str(error)
    whole_text = _text_of(error)
    described = _describe_text(whole_text)
    if described is not None:
        return described
    text = shortened(next((line.strip() for line in whole_text.splitlines() if line.strip()), ""))
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {shortened(str(error.msg))}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_code(frame.filename)]
    if not user_frames and not frames:
        return summary
    frame = user_frames[-1] if user_frames else frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {summary}"


def _text_of(error: BaseException) -> str:
    """Return `str(error)`; "" if the `__str__` of a user's exception raises an error itself."""
    try:
        return str(error)
    except Exception:
        return ""


def _describe_text(text: str) -> str | None:
    """Return the same line for a traceback as text, as torch's data loader sends that of its worker; None without one.

    The exception is the first line after the last frame that is not indented. Its message may have more lines.
    """
    lines = text.partition("Original Traceback")[2].splitlines()
    frames = [(number, match) for number, line in enumerate(lines) if (match := _FRAME.match(line))]
    if not frames:
        return None
    summary = next((line for line in lines[frames[-1][0] :] if line.strip() and not line[0].isspace()), None)
    if summary is None:
        return None
    user_frames = [match for _, match in frames if is_user_code(match[1])]
    file, line_number, function = (user_frames or [match for _, match in frames])[-1].groups()
    return f"{Path(file).name}:{line_number} in {function}: {shortened(summary)}"


@functools.lru_cache(maxsize=4096)
def is_user_code(filename: str) -> bool:
    """Return whether a file is user code: not in everyrank, Python or an installed package."""
    # by strings: an audit asks this of some thousand modules, and a Path takes ten times as long
    inside = {"site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"}
    return not (filename.startswith((_PACKAGE, "<")) or inside.intersection(filename.split(os.sep)))  # noqa: PTH206


def shortened(text: str) -> str:
    """Return a message that fits a screen: a long one is cut in the middle, with its length."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 4 :]}"


def printable(text: str) -> str:
    """Return the text without control characters, because foreign text must not control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def signal_text(number: int) -> str:
    """`SIGKILL`, with what it often means; `signal 41` for a number without a name, such as a real-time signal."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (often out of memory)" if name == "SIGKILL" else name
