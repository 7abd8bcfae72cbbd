"""How fast a training goes: the seconds of its updates, evaluations and checkpoints apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from everyrank.record import Interval

__all__ = ["ThroughputMeter"]


class ThroughputMeter:
    """A clock for the updates of a training from number `begin` on.

    `samples_before` says how many samples the updates before a number have read. The first update is timed by itself:
    it makes buffers, and compiles.
    """

    def __init__(self, begin: int, samples_before: Callable[[int], int]) -> None:
        self.begin, self.samples_before = begin, samples_before
        self.first_step_seconds: float | None = None
        self.seconds = 0.0  # of all updates after the first
        self.started = self.epoch_started = time.perf_counter()
        self.paused = self.paused_in_epoch = 0.0
        self.pause_started: float | None = None

    def start(self) -> None:
        """The first update begins."""
        self.started = self.epoch_started = time.perf_counter()

    def first(self) -> None:
        """The first update is done."""
        self.first_step_seconds = time.perf_counter() - self.started

    def look(self) -> None:
        """The updates so far are done."""
        assert self.first_step_seconds is not None
        self.seconds = time.perf_counter() - self.started - self.first_step_seconds - self.paused

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """What happens in here is no update."""
        start = self.pause_started = time.perf_counter()
        try:
            yield
        finally:
            now, self.pause_started = time.perf_counter(), None
            self.paused += now - start
            self.paused_in_epoch += now - max(start, self.epoch_started)  # an epoch may have begun in here

    def epoch(self) -> float:
        """Seconds of the epoch that ends here (of its part in this run), and the next one begins."""
        now = time.perf_counter()
        pausing = 0.0 if self.pause_started is None else now - self.pause_started
        seconds = now - self.epoch_started - self.paused_in_epoch - pausing
        self.epoch_started, self.paused_in_epoch = now, 0.0
        return seconds

    def speed(self, done: int) -> float:
        """Samples a second over all updates but the first, when `done` are done; 0 where there are none."""
        samples = self.samples_before(done) - self.samples_before(self.begin + 1)
        return samples / self.seconds if samples > 0 and self.seconds > 0 else 0.0

    def throughput(self, end: int) -> Interval | None:
        """Samples a second in the whole run, which ended after update `end` - 1."""
        speed = self.speed(end)
        return _once(speed) if speed else None

    def step_seconds(self, end: int) -> Interval | None:
        """Seconds of an update."""
        return _once(self.seconds / (end - self.begin - 1)) if self.throughput(end) else None


def _once(value: float) -> Interval:
    return Interval(value, value, value, trials=1)
