"""RECENT_CALLS: the newest calls of this process to the backends of everyrank, to explain hangs and stragglers.

It does what torch's Flight Recorder does for gloo and nccl, which does not see backends written in Python.
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

_MAX_CALLS = 256


@dataclass(slots=True, eq=False)
class RecentCall:
    """One call.

    number         position among the collectives, or among the messages, of this group; the first is 1
    num_elements   number of elements in the inputs of this rank, or in the tensor that a receive fills
    code, offset   the function of user code that made the call, and the offset of its instruction
    is_done        whether the call ended at once, and so has no `work`
    work           a weak reference, so that its output tensors are not kept alive
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
        """Return the call as a list; `RecentCalls.rows` describes it."""
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
    """A ring buffer of the newest calls.

    counts   number of calls so far for each (group name, whether they are messages)
    """

    def __init__(self) -> None:
        self.ring: deque[RecentCall] = deque(maxlen=_MAX_CALLS)
        self.counts: dict[tuple[str, bool], int] = {}

    def record(self, operation: str, group: str, inputs: Sequence[Tensor]) -> RecentCall:
        """Add a call that begins, and return it.

        The search for the line of user code starts three frames above, at the method of `PythonGroup` that torch calls.
        """
        is_message = operation in ("send", "recv")
        number = self.counts[group, is_message] = self.counts.get((group, is_message), 0) + 1
        num_elements, dtype = 0, None
        for tensor in inputs:
            num_elements, dtype = num_elements + tensor.numel(), tensor.dtype
        code, offset = _caller(sys._getframe(3))  # pyright: ignore[reportPrivateUsage]
        call = RecentCall(group, number, operation, num_elements, dtype, is_message, time.time_ns(), code, offset)
        self.ring.append(call)
        return call

    def reset_group(self, group: str) -> None:
        """Remove the calls of a destroyed group whose name a new group takes, and count from 1 again."""
        for is_message in (False, True):
            self.counts.pop((group, is_message), None)
        for call in self.ring.copy():
            if call.group == group:
                self.ring.remove(call)

    def rows(self) -> list[list[Any]]:
        """Return a list for each call, oldest first.

        [group, number, operation, elements, dtype, whether it is done, whether it is a message, start time in ns,
        (file, line, function) of user code or None].
        """
        return [call.row() for call in self.ring.copy()]


_is_user_file = functools.lru_cache(maxsize=4096)(is_user_code)


def _caller(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Return the innermost function of user code and the offset of its instruction.

    The line is computed only when it is needed, because that takes far longer.
    """
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def _line(code: CodeType, offset: int) -> int:
    """Return the line of the instruction at this offset."""
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line is not None)
    return next(lines, code.co_firstlineno)


RECENT_CALLS = RecentCalls()
