"""The newest calls of this process to backends of ours: for whoever asks why a job hangs, or who comes late.

What torch's Flight Recorder is for gloo and nccl; it does not see backends in Python.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from everyrank.backends.engine import PendingWork
from everyrank.errors import is_own

__all__ = ["RECENT_CALLS", "RecentCalls"]

_KEPT = 256


class _Call(NamedTuple):
    group: str
    number: int  # of the collectives, or of the messages, of this group, from 1
    operation: str
    num_elements: int  # elements that this rank hands in
    dtype: str
    is_message: bool
    time_ns: int
    code: CodeType | None  # of the person's function that called
    line: int
    work: Any  # a weak reference: tensors that it fills are not kept alive


class RecentCalls:
    """A ring of calls, the oldest forgotten first."""

    def __init__(self) -> None:
        self.ring: deque[_Call] = deque(maxlen=_KEPT)
        self.numbers: dict[tuple[str, bool], int] = {}

    def note(self, operation: str, group: str, handed_in: Sequence[Tensor], work: PendingWork) -> None:
        """A call begins."""
        is_message = operation in ("send", "recv")
        number = self.numbers[group, is_message] = self.numbers.get((group, is_message), 0) + 1
        num_elements = sum(map(Tensor.numel, handed_in))
        dtype = str(handed_in[0].dtype) if handed_in else ""
        code, line = _caller(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
        row = _Call(
            group, number, operation, num_elements, dtype, is_message, time.time_ns(), code, line, weakref.ref(work)
        )
        self.ring.append(row)

    def forget(self, group: str) -> None:
        """A new group has this name: its calls are counted from 1."""
        for is_message in (False, True):
            self.numbers.pop((group, is_message), None)
        for call in self.ring.copy():
            if call.group == group:
                self.ring.remove(call)

    def rows(self) -> list[list[Any]]:
        """Of each call what a `world.calls` row says.

        [group, number, operation, elements, dtype, whether it is done, whether it is a message, begun at ns,
        (file, line, function) of the person's code or None].
        """
        found: list[list[Any]] = []
        for call in self.ring.copy():
            work = call.work()
            is_done = work is None or (work.done and work.error is None)
            dtype = call.dtype.removeprefix("torch.")
            place = (call.code.co_filename, call.line, call.code.co_name) if call.code is not None else None
            found.append([*call[:4], dtype, is_done, call.is_message, call.time_ns, place])
        return found


_is_own = functools.lru_cache(maxsize=4096)(is_own)


def _caller(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The innermost function of the person's, and its line."""
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


RECENT_CALLS = RecentCalls()
