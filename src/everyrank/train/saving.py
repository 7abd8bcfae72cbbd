"""Decides when a checkpoint is due, saves it, and reports a failure to save.

`--save-every auto` uses the interval of Young (1974) and Daly (2006). Each checkpoint costs time, and each failure
loses the updates since the last one. With saving time d and mean time M between failures, a checkpoint every
sqrt(2 d M) seconds loses the least; Daly's higher terms matter where d is not small relative to M. Only the time for
which the training waits counts as saving time.
"""

from __future__ import annotations

import dataclasses
import statistics

from everyrank.checkpoint import SaveError, Saver
from everyrank.data import Updates
from everyrank.errors import EveryrankError, StoppedError
from everyrank.options import AUTO, TrainOptions
from everyrank.runs import optimal_interval_seconds
from everyrank.strategies import Prepared
from everyrank.train.display import Display
from everyrank.train.guard import Guard
from everyrank.train.log import Log
from everyrank.world import from_rank_0

__all__ = ["Saving", "is_every"]

_FIRST_AUTO_UPDATES = 10  # updates before the first checkpoint under `auto`, which measures the saving time
_NUM_STALLS = 5  # number of checkpoints in the median of the saving time
_HOUR = 3600.0


class Saving:
    """Saves the checkpoints of one training when they are due. All ranks take the same decisions.

    every                updates between two checkpoints; under `auto` suggested by rank 0; None: each epoch; 0: none
    checkpoint_pending   a checkpoint is due, but replicas differ, as in local_sgd; it is saved when they are equal
    """

    def __init__(
        self,
        saver: Saver | None,
        prepared: Prepared,
        updates: Updates,
        options: TrainOptions,
        display: Display,
        log: Log | None,
    ) -> None:
        self.saver, self.prepared, self.updates = saver, prepared, updates
        self.display, self.log = display, log
        self.is_auto = options.save_every == AUTO
        self.every = _FIRST_AUTO_UPDATES if isinstance(options.save_every, str) else options.save_every
        self.mtbf_seconds = options.mtbf * _HOUR
        self.checkpoint_pending = self.announced = False
        self.tried_at = updates.start_step
        self.guard = Guard(prepared, options.guard, options.guard_every, updates.start_step) if options.guard else None
        if self.guard is not None and not self.guard.compares:
            display.line(f"--guard: layout {prepared.layout} has no replicated tensors, so the guard compares nothing")

    def is_due(self, done: int) -> bool:
        """Return whether to save now. A checkpoint that is due waits until the replicas are equal."""
        if self.saver is None:
            return False
        if self.is_auto:
            assert self.every is not None
            self.checkpoint_pending = self.checkpoint_pending or done - self.tried_at >= self.every
        else:
            self.checkpoint_pending = self.checkpoint_pending or is_every(self.every, done, self.updates)
        return self.checkpoint_pending and self.prepared.are_replicas_equal

    def suggest(self, step_seconds: float) -> int:
        """Return the updates between two checkpoints under `auto`, by this rank's clock; 0 while unknown."""
        if not self.is_auto or self.saver is None or not self.saver.stalls or step_seconds <= 0:
            return 0
        save_seconds = statistics.median(self.saver.stalls[-_NUM_STALLS:])
        return max(1, round(optimal_interval_seconds(save_seconds, self.mtbf_seconds) / step_seconds))

    def agree(self, every: int) -> None:
        """Take over rank 0's suggestion, which all ranks receive at the same update."""
        if every and every != self.every:
            if not self.announced and self.saver is not None:
                self.announced = True
                self.display.line(
                    f"a checkpoint every {every} updates: saving takes {statistics.median(self.saver.stalls):.3g} s, "
                    f"and {self.mtbf_seconds / _HOUR:g} h lie between two failures (--mtbf)"
                )
            self.every = every

    def compare(self, done: int) -> None:
        """Compare replicas if `--guard` is set. Raises `DivergedError`."""
        if self.guard is not None and (line := self.guard.check(done)):
            self.display.line(line)

    def compare_every(self, done: int) -> None:
        """Compare replicas if `--guard-every` is due."""
        if self.guard is not None and self.guard.is_due(done):
            self.compare(done)

    def save(self, done: int, metrics: dict[str, float], is_last: bool = False) -> None:
        """Save a checkpoint. A failure is printed and the training continues, except for the last checkpoint."""
        assert self.saver is not None
        self.compare(done)
        self.checkpoint_pending, self.tried_at = False, done
        self.saver.metadata = dataclasses.replace(self.saver.metadata, place=self.updates.position(done))
        try:
            earlier_error = self.saver.save(done, metrics)
            if earlier_error is not None:
                self.display.line(f"{self.saver.why_not_saved(earlier_error)}; the training continues")
        except SaveError as error:
            if is_last:
                raise EveryrankError(self.saver.why_not_saved(error)) from error
            self.display.line(f"{self.saver.why_not_saved(error)}; the training continues")
        else:
            if self.log is not None:
                self.log.event({"step": done, "checkpoint": True, "stall_seconds": self.saver.stalls[-1]})
        if is_last:
            self.saver.finish_or_report()

    def stopped(self, done: int, metrics: dict[str, float]) -> None:
        """Save and end after a stop signal. Raises `StoppedError`, or `EveryrankError` if the save failed."""
        self.display.end()
        text = f"stopped after update {done} of {self.updates.end or '?'}, after a stop signal"
        if self.saver is None:
            raise StoppedError(f"{text}; nothing was saved")
        failure = ""
        try:
            if self.saver.last_saved != done:
                self.save(done, metrics, is_last=True)
            self.saver.finish_or_report()
        except EveryrankError as error:
            failure = str(error)
        # only rank 0 knows whether the whole checkpoint is on disk
        failure = from_rank_0(self.prepared.world, "stopped", lambda: failure)
        if failure:
            raise EveryrankError(f"{text}; {failure}")
        raise StoppedError(f"{text}; saved in {self.saver.run}; resume with --out {self.saver.run} --resume")


def is_every(every: int | None, done: int, updates: Updates) -> bool:
    """Return whether an action every `every` updates (0: never, None: after each epoch) is due."""
    return updates.ends_epoch(done) if every is None else every > 0 and done % every == 0
