"""How fast a training goes: the seconds of its updates, evaluations and checkpoints apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from everyrank.data import samples_before, updates_per_epoch
from everyrank.record import Interval

__all__ = ["ThroughputMeter"]


class ThroughputMeter:
    """A clock for the updates `begin` to `end` - 1 of a training over `length` samples.

    The first update is timed by itself: it makes buffers, and compiles.
    """

    def __init__(self, begin: int, end: int, length: int, global_batch: int) -> None:
        self.begin, self.end, self.length, self.global_batch = begin, end, length, global_batch
        self.per_epoch = updates_per_epoch(length, global_batch)
        self.first_step_seconds: float | None = None
        self.seconds = 0.0  # of all updates after the first
        self.started = self.epoch_started = time.perf_counter()
        self.paused = self.paused_in_epoch = 0.0

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
        start = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - start
            self.paused_in_epoch += time.perf_counter() - start

    def epoch(self) -> float:
        """Seconds of the epoch that ends here (of its part in this run), and the next one begins."""
        now = time.perf_counter()
        seconds = now - self.epoch_started - self.paused_in_epoch
        self.epoch_started, self.paused_in_epoch = now, 0.0
        return seconds

    def speed(self, done: int) -> float:
        """Samples a second over all updates but the first, when `done` are done; 0 where there are none."""
        sizes = (self.length, self.global_batch)
        samples = samples_before(done, *sizes) - samples_before(self.begin + 1, *sizes)
        return samples / self.seconds if samples > 0 and self.seconds > 0 else 0.0

    def throughput(self) -> Interval | None:
        """Samples a second in the whole run."""
        speed = self.speed(self.end)
        return _once(speed) if speed else None

    def step_seconds(self) -> Interval | None:
        """Seconds of an update."""
        return _once(self.seconds / (self.end - self.begin - 1)) if self.throughput() else None

    def epoch_seconds(self) -> float | None:
        """Seconds of an epoch at that speed."""
        step = self.step_seconds()
        return step.median * self.per_epoch if step else None


def _once(value: float) -> Interval:
    return Interval(value, value, value, trials=1)
