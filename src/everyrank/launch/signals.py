"""A request to stop after the update in progress: SIGTERM or SIGUSR1 from a scheduler, before it kills."""

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
    """Which signal asked; None while none has."""

    asked: signal.Signals | None = None


@contextlib.contextmanager
def catch_signals(*signals: signal.Signals, same_seconds: float = 0.0) -> Generator[Stop]:
    """Note these signals instead of being ended by them; a SIGTERM after one of them does what it did before.

    Within `same_seconds` it is taken for the same request: schedulers send it to a rank and to its supervisor,
    which passes it on.

    Outside the main thread no signal can be caught, and nothing is ever asked.
    """
    stop, asked_at = Stop(), 0.0
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        earlier = before[signal.Signals(number)]
        if stop.asked is None:
            stop.asked, asked_at = signal.Signals(number), time.monotonic()
        elif number != signal.SIGTERM or (stop.asked == number and time.monotonic() < asked_at + same_seconds):
            pass
        elif callable(earlier):
            earlier(number, frame)
        else:
            raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in signals:
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
