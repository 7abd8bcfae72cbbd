"""A clock that advances each time the script reads it, so that printed seconds and speeds are equal in all runs."""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import time
from typing import Any

from everyrank.audit.watch.source_location import is_user_file

__all__ = ["install_clock"]

_TICK_SECONDS = 0.001  # seconds


def install_clock() -> None:
    """Replace the clocks of `time` for the user's own code. Libraries keep the real clocks, because they wait."""
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        real = getattr(time, name)
        setattr(time, name, _ticking_clock(real, real() if name == "time" else 0.0))


def _ticking_clock(real: Any, start: float) -> Any:
    num_reads = 0

    def now() -> float:
        nonlocal num_reads
        if not is_user_file(sys._getframe(1).f_code.co_filename):
            return real()
        num_reads += 1
        return start + num_reads * _TICK_SECONDS

    return now
