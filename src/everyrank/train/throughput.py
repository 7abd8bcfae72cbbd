"""Measures samples per second and the time of updates, without evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from everyrank.record import Interval

__all__ = ["ThroughputMeter"]


class ThroughputMeter:
    """Measures the time of the updates of a training from `start_step` on.

    `samples_before(step)` returns the number of samples in the updates before `step`. The first update is timed
    separately, because it allocates buffers and compiles.
    """

    def __init__(self, start_step: int, samples_before: Callable[[int], int]) -> None:
        self.start_step, self.samples_before = start_step, samples_before
        self.first_step_seconds: float | None = None
        self.seconds = 0.0  # of all updates after the first
        self.started = self.epoch_started = time.perf_counter()
        self.paused = self.paused_in_epoch = 0.0
        self.pause_started: float | None = None

    def start(self) -> None:
        """Start the clock before the first update."""
        self.started = self.epoch_started = time.perf_counter()

    def first(self) -> None:
        """Take the time of the first update."""
        self.first_step_seconds = time.perf_counter() - self.started

    def update(self) -> None:
        """Take the time of the updates so far."""
        assert self.first_step_seconds is not None
        self.seconds = time.perf_counter() - self.started - self.first_step_seconds - self.paused

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """Stop the clock inside this block."""
        start = self.pause_started = time.perf_counter()
        try:
            yield
        finally:
            now, self.pause_started = time.perf_counter(), None
            self.paused += now - start
            self.paused_in_epoch += now - max(start, self.epoch_started)  # an epoch may have started inside the block

    def epoch(self) -> float:
        """Return the seconds of the epoch that ends now, in this run, and start the next one."""
        now = time.perf_counter()
        pausing = 0.0 if self.pause_started is None else now - self.pause_started
        seconds = now - self.epoch_started - self.paused_in_epoch - pausing
        self.epoch_started, self.paused_in_epoch = now, 0.0
        return seconds

    def speed(self, done: int) -> float:
        """Return samples per second without the first update, after `done` updates; 0 if there are none."""
        samples = self.samples_before(done) - self.samples_before(self.start_step + 1)
        return samples / self.seconds if samples > 0 and self.seconds > 0 else 0.0

    def throughput(self, end: int) -> Interval | None:
        """Return samples per second of the whole run, which ended after update `end` - 1."""
        speed = self.speed(end)
        return _one_trial(speed) if speed else None

    def step_seconds(self, end: int) -> Interval | None:
        """Return the seconds of an update."""
        return _one_trial(self.seconds / (end - self.start_step - 1)) if self.throughput(end) else None


def _one_trial(value: float) -> Interval:
    return Interval(value, value, value, trials=1)
