"""A clock that advances when the script reads it or sleeps, so that printed seconds are equal in all runs."""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import time
from typing import Any

from everyrank.audit.watch.source_location import is_user_file

__all__ = ["install_clock"]

_TICK_SECONDS = 0.001


def install_clock() -> None:
    """Replace the clocks of `time` for the user's own code. Libraries keep the real clocks, because they wait."""
    slept_seconds = [0.0]  # of the user's code, which may wait until a clock has advanced
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        real = getattr(time, name)
        slept = [0.0] if name == "process_time" else slept_seconds
        setattr(time, name, _ticking_clock(real, real() if name == "time" else 0.0, slept))
    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if is_user_file(sys._getframe(1).f_code.co_filename):
            slept_seconds[0] += seconds

    time.sleep = sleep


def _ticking_clock(real: Any, start: float, slept_seconds: list[float]) -> Any:
    num_reads = 0

    def now() -> float:
        nonlocal num_reads
        if not is_user_file(sys._getframe(1).f_code.co_filename):
            return real()
        num_reads += 1
        return start + num_reads * _TICK_SECONDS + slept_seconds[0]

    return now
