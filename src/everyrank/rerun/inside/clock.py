"""A clock that ticks with each question of the script, so that printed seconds and rates are the same in every run."""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import time
from typing import Any

from everyrank.audit.watch.place import is_own_file

__all__ = ["install_clock"]

_TICK = 0.001  # seconds


def install_clock() -> None:
    """Replace the clocks of `time` for the user's own code. Libraries, which wait by them, have the real ones."""
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        real = getattr(time, name)
        setattr(time, name, _ticking(real, real() if name == "time" else 0.0))


def _ticking(real: Any, start: float) -> Any:
    count = 0

    def now() -> float:
        nonlocal count
        if not is_own_file(sys._getframe(1).f_code.co_filename):
            return real()
        count += 1
        return start + count * _TICK

    return now
