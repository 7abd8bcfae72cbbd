"""Signals that request a stop after the current update: SIGTERM or SIGUSR1, which schedulers send before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Stop", "catch_signals"]


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


@contextlib.contextmanager
def catch_signals(*signals: signal.Signals, same_seconds: float = 0.0) -> Generator[Stop]:
    """Record these signals instead of ending the process. A second request by SIGTERM has its previous effect.

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
