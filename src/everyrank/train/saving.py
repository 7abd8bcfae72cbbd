"""When a training saves, and what is said where it cannot.

`--save-every auto` is the question of Young (1974) and Daly (2006): every checkpoint costs time, and every failure
costs what was computed since the last one. With a saving time d and a mean time M between failures the least is lost
with a checkpoint every sqrt(2 d M) seconds; Daly's next terms keep that right where d is no longer small beside M.
What the saving costs here is the time for which the training stands still.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from everyrank.checkpoint import SaveError, Saver
from everyrank.data import Updates
from everyrank.errors import EveryrankError, StoppedError
from everyrank.options import AUTO, TrainOptions
from everyrank.strategies import Prepared
from everyrank.train.display import Display
from everyrank.train.guard import Guard
from everyrank.train.log import Log
from everyrank.world import from_rank_0

__all__ = ["Saving", "is_every", "optimal_interval_seconds"]

_FIRST_AUTO = 10  # updates before the checkpoint that tells how long one takes
_NEWEST = 5  # checkpoints whose time counts
_HOUR = 3600.0


def optimal_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose the least to saving and to failures.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), equation 37; its first term is J. W. Young's (CACM 17, 1974).
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds


class Saving:
    """The checkpoints of one training: when they are due, each saved, or why not. All ranks decide alike.

    every     updates between two; under `auto` the number agreed upon last; None: after each epoch; 0: none
    owes      one was due when it could not be saved: replicas were not equal then
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
        self.every = _FIRST_AUTO if isinstance(options.save_every, str) else options.save_every
        self.mtbf_seconds = options.mtbf * _HOUR
        self.owes = self.was_said = False
        self.tried_at = updates.start_step
        self.guard = Guard(prepared, options.guard, options.guard_every, updates.start_step) if options.guard else None
        if self.guard is not None and not self.guard.compares:
            display.line(f"--guard: under {prepared.layout} no rank holds what another holds: nothing is compared")

    def is_due(self, done: int) -> bool:
        """Whether a checkpoint is due here, or was before, when the replicas were not equal."""
        if self.saver is None:
            return False
        if self.is_auto:
            assert self.every is not None
            self.owes = self.owes or done - self.tried_at >= self.every
        else:
            self.owes = self.owes or is_every(self.every, done, self.updates)
        return self.owes and self.prepared.are_replicas_equal

    def suggest(self, step_seconds: float) -> int:
        """Under `auto`: updates between two checkpoints, by this rank's clock; 0 where it does not know yet."""
        if not self.is_auto or self.saver is None or not self.saver.stalls or step_seconds <= 0:
            return 0
        save_seconds = statistics.median(self.saver.stalls[-_NEWEST:])
        return max(1, round(optimal_interval_seconds(save_seconds, self.mtbf_seconds) / step_seconds))

    def agree(self, every: int) -> None:
        """What rank 0 has suggested, which all ranks hear in the same update."""
        if every and every != self.every:
            if not self.was_said and self.saver is not None:
                self.was_said = True
                self.display.line(
                    f"a checkpoint every {every} updates: saving takes {statistics.median(self.saver.stalls):.3g} s, "
                    f"and {self.mtbf_seconds / _HOUR:g} h lie between two failures (--mtbf)"
                )
            self.every = every

    def compare(self, done: int) -> None:
        """Compare replicas, where there is a guard. Raises `DivergedError`."""
        if self.guard is not None and (line := self.guard.check(done)):
            self.display.line(line)

    def compare_every(self, done: int) -> None:
        """The same where it is time for it, whether a checkpoint is due or not."""
        if self.guard is not None and self.guard.is_due(done):
            self.compare(done)

    def save(self, done: int, metrics: dict[str, float], is_last: bool = False) -> None:
        """Save; a failure is said, and the training goes on: nothing of it is lost, and the next attempt may do."""
        assert self.saver is not None
        self.compare(done)
        self.owes, self.tried_at = False, done
        self.saver.about = dataclasses.replace(self.saver.about, place=self.updates.position(done))
        try:
            earlier = self.saver.save(done, metrics)
            if earlier is not None:
                self.display.line(f"{self.saver.why_not_saved(earlier)}; the training goes on")
        except SaveError as error:
            if is_last:
                raise EveryrankError(self.saver.why_not_saved(error)) from error
            self.display.line(f"{self.saver.why_not_saved(error)}; the training goes on")
        else:
            if self.log is not None:
                self.log.event({"step": done, "checkpoint": True, "stall_seconds": self.saver.stalls[-1]})
        if is_last:
            self.saver.finish_or_say()

    def stopped(self, done: int, metrics: dict[str, float]) -> None:
        """End after an update, because a signal asked for it. Raises `StoppedError`, or why nothing was saved."""
        self.display.end()
        text = f"stopped after update {done} of {self.updates.end or '?'}, as a signal asked"
        if self.saver is None:
            raise StoppedError(f"{text}; nothing was saved")
        failure = ""
        try:
            if self.saver.last_saved != done:
                self.save(done, metrics, is_last=True)
            self.saver.finish_or_say()
        except EveryrankError as error:
            failure = str(error)
        # rank 0 alone knows whether all of it is on the disk
        failure = from_rank_0(self.prepared.world, "stopped", lambda: failure)
        if failure:
            raise EveryrankError(f"{text}; {failure}")
        raise StoppedError(f"{text}; saved in {self.saver.run}; go on with --out {self.saver.run} --resume")


def is_every(every: int | None, done: int, updates: Updates) -> bool:
    """Whether what is done every so many updates (0: never, None: after each epoch) is due."""
    return updates.ends_epoch(done) if every is None else every > 0 and done % every == 0
