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
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.engine import PendingWork
from everyrank.errors import is_user_code

__all__ = ["RECENT_CALLS", "RecentCall", "RecentCalls"]

_KEPT = 256


@dataclass(slots=True, eq=False)
class RecentCall:
    """One call.

    number         of the collectives, or of the messages, of this group, from 1
    num_elements   elements that this rank hands in
    code, offset   the person's function that called, and how far it was
    is_done        at once: without a `work`
    work           a weak reference: tensors that it fills are not kept alive
    """

    group: str
    number: int
    operation: str
    num_elements: int
    dtype: torch.dtype | None
    is_message: bool
    time_ns: int
    code: CodeType | None
    offset: int
    is_done: bool = False
    work: weakref.ref[PendingWork] | None = None

    def row(self) -> list[Any]:
        """As `RecentCalls.rows` says."""
        is_done = self.is_done
        if self.work is not None:
            work = self.work()
            is_done = work is None or (work.done and work.error is None)
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        location = (
            None if self.code is None else (self.code.co_filename, _line(self.code, self.offset), self.code.co_name)
        )
        call = [self.group, self.number, self.operation, self.num_elements, dtype]
        return [*call, is_done, self.is_message, self.time_ns, location]


class RecentCalls:
    """A ring of calls, the oldest forgotten first."""

    def __init__(self) -> None:
        self.ring: deque[RecentCall] = deque(maxlen=_KEPT)
        self.numbers: dict[tuple[str, bool], int] = {}

    def note(self, operation: str, group: str, handed_in: Sequence[Tensor]) -> RecentCall:
        """A call begins: a method of a `PythonGroup`, which is two frames above."""
        is_message = operation in ("send", "recv")
        number = self.numbers[group, is_message] = self.numbers.get((group, is_message), 0) + 1
        num_elements, dtype = 0, None
        for tensor in handed_in:
            num_elements, dtype = num_elements + tensor.numel(), tensor.dtype
        code, offset = _caller(sys._getframe(3))  # pyright: ignore[reportPrivateUsage]
        call = RecentCall(group, number, operation, num_elements, dtype, is_message, time.time_ns(), code, offset)
        self.ring.append(call)
        return call

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
        return [call.row() for call in self.ring.copy()]


_is_own = functools.lru_cache(maxsize=4096)(is_user_code)


def _caller(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The innermost function of the person's, and the offset of its instruction: its line takes far longer to find."""
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def _line(code: CodeType, offset: int) -> int:
    lines = (line for first, end, line in code.co_lines() if first <= offset < end and line is not None)
    return next(lines, code.co_firstlineno)


RECENT_CALLS = RecentCalls()
