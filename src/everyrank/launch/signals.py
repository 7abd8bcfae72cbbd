"""Signals that request a stop after the current update: SIGTERM or SIGUSR1, which schedulers send before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Stop", "catch_signals", "is_end_requested"]


@dataclass
class Stop:
    """The signal that requested a stop; None before.

    grace_seconds   None: ranks get SIGUSR1 until they end. A number: the signal itself is passed on to the ranks once,
                    and ranks that still run after this time are killed (SIGUSR1 ends no rank)
    count           number of signals to pass on
    """

    asked: signal.Signals | None = None
    grace_seconds: float | None = None
    count: int = 0

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks are asked to end; False if only SIGUSR1 is passed on to them."""
        return self.asked is not None and (self.grace_seconds is None or self.asked != signal.SIGUSR1)

    @property
    def request(self) -> str:
        """The content of the file `stop` in the job folder: "COUNT SIGNAL" to pass on, or "": SIGUSR1 until the end."""
        return "" if self.grace_seconds is None else f"{self.count} {int(self.asked or 0)}"


def is_end_requested(directory: Path) -> bool:
    """Whether the file `stop` in this job folder asks the ranks to end: `Stop.ends_ranks` for other processes."""
    try:
        text = (directory / "stop").read_text()
    except OSError:
        return False
    return not text.endswith(f" {int(signal.SIGUSR1)}")


@contextlib.contextmanager
def catch_signals(*signals: signal.Signals, same_seconds: float = 0.0) -> Generator[Stop]:
    """Record these signals instead of ending the process. A second SIGTERM runs the previous handler, or ends the
    process if there was none.

    A SIGTERM within `same_seconds` counts as the same request: schedulers send it to a rank and to its supervisor,
    which forwards it.

    Outside the main thread no signal can be caught, so no stop is ever requested.
    """
    stop, requested_at = Stop(), 0.0
    previous_handlers: dict[signal.Signals, Any] = {}

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at
        previous = previous_handlers[signal.Signals(number)]
        if stop.asked is None:
            stop.asked, requested_at = signal.Signals(number), time.monotonic()
        elif number != signal.SIGTERM or (stop.asked == number and time.monotonic() < requested_at + same_seconds):
            pass
        elif callable(previous):
            previous(number, frame)
        else:
            raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in signals:
            previous_handlers[number] = signal.signal(number, record)
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
