"""Which phase a step is in, for whoever wants to know: nobody, but in the runs that take a step apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

__all__ = ["enter_phase", "observe_phases"]

_observers: list[Callable[[str], None]] = []


def enter_phase(phase: str) -> None:
    """Say that the step enters forward, backward or optimizer."""
    for observer in _observers:
        observer(phase)


@contextlib.contextmanager
def observe_phases(observer: Callable[[str], None]) -> Generator[None]:
    """Call `observer` with forward, backward or optimizer whenever a step of this process enters that phase."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
