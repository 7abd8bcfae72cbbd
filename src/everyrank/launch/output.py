"""What rank 0 prints, where its launcher puts a mark before each line: taken off again, on its way to the screen."""

from __future__ import annotations

import os
import re
import threading
from typing import IO

__all__ = ["pass_on_output"]

_LINES = re.compile(rb"(?<=[\r\n])")  # a progress bar begins its line again by \r


def pass_on_output(printed: IO[bytes], mark: bytes, others: IO[bytes]) -> threading.Thread:
    """Start to write to this process's own output what rank 0 prints, until the launcher has closed `printed`.

    mark     a regular expression of what the launcher puts before each line of rank 0
    others   the file for lines without it: what the launcher itself says
    """
    thread = threading.Thread(target=_pass_on, args=(printed, re.compile(mark), others), daemon=True)
    thread.start()
    return thread


def _pass_on(printed: IO[bytes], mark: re.Pattern[bytes], others: IO[bytes]) -> None:
    rest = b""
    with printed, os.fdopen(os.dup(1), "wb", buffering=0) as screen:
        while chunk := os.read(printed.fileno(), 65_536):
            *lines, rest = _LINES.split(rest + chunk)
            for line in lines:
                _write(line, mark, screen, others)
        _write(rest, mark, screen, others)


def _write(line: bytes, mark: re.Pattern[bytes], screen: IO[bytes], others: IO[bytes]) -> None:
    found = mark.match(line)
    if found is None:
        if not others.closed:
            others.write(line)
        return
    left = memoryview(line)[found.end() :]
    while left:
        left = left[screen.write(left) :]
