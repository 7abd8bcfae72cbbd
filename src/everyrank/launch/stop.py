"""A request to stop after the update in progress: SIGTERM or SIGUSR1 from a scheduler, before it kills."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Stop", "listen"]


@dataclass
class Stop:
    """Which signal asked; None while none has."""

    asked: signal.Signals | None = None


@contextlib.contextmanager
def listen(*signals: signal.Signals) -> Generator[Stop]:
    """Note these signals instead of being ended by them; a SIGTERM after one of them does what it did before.

    Outside the main thread nothing can be listened for, and nothing is ever asked.
    """
    stop = Stop()
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        earlier = before[signal.Signals(number)]
        if stop.asked is None or number != signal.SIGTERM:
            stop.asked = stop.asked or signal.Signals(number)
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
