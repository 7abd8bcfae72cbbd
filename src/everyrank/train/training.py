"""The updates of a training, and what stands between two of them: a look at the losses, an evaluation, a checkpoint.

All ranks take every decision alike. What only one of them may know (a signal, the time) travels with the sums of the
losses, which are added up over ranks every few updates anyway.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everyrank.checkpoint import SaveError, Saver
from everyrank.data import Update, Updates, epoch_of, is_uncounted
from everyrank.errors import DivergedError, EveryrankError, NotFiniteError, WorkloadError
from everyrank.launch import Stop
from everyrank.launch.hosts import host_name
from everyrank.loop import run_updates
from everyrank.loop.finite import check_finite, nonfinite_loss_error
from everyrank.measure.clock import interval
from everyrank.measure.resource_log import resource_log
from everyrank.measure.timeline import with_one_profiled
from everyrank.options import TrainOptions
from everyrank.runs import About, best_of, checkpoints_of, is_better, score_of
from everyrank.strategies import Prepared
from everyrank.train.display import Display, format_metrics
from everyrank.train.job import TrainingJob, evaluate_job
from everyrank.train.log import open_log
from everyrank.train.on_epoch import after_epoch
from everyrank.train.saving import Saving, is_every
from everyrank.train.stragglers import StragglerWatch
from everyrank.train.throughput import ThroughputMeter
from everyrank.world import World
from everyrank.world.collectives import sum_over_ranks

__all__ = ["Training"]

_PROFILED_UPDATE = 10  # by then every buffer is made and every bucket rebuilt
_MOST_UPDATES = 10  # between two looks at the losses
_APART = 100  # more than the longest of these: what else rank 0 says stands above it in one number
_LOOK_SECONDS = 0.25  # and so long at most: a request to stop is answered about as fast


class Training:
    """One training, of these updates.

    losses    of all updates, those before a checkpoint too where the log has them
    metrics   of the newest evaluation
    """

    def __init__(
        self,
        job: TrainingJob,
        options: TrainOptions,
        about: About,
        updates: Updates,
        display: Display,
        stop: Stop,
    ) -> None:
        self.job, self.prepared, self.options = job, job.prepared, options
        self.updates, self.done, self.epoch = updates, updates.start_step, updates.epoch
        self.display, self.stop = display, stop
        self.meter = ThroughputMeter(updates.start_step, updates.samples_before)
        self.saver: Saver | None = None
        if options.out is not None and options.save_every != 0:
            self.saver = Saver(options.out, self.prepared, job.prepared.world, about, options.keep, options.save_async)
        earlier, self.log = open_log(self.prepared, options, updates.start_step, display)
        earlier = [row for row in earlier if "loss" in row]
        if len(earlier) != updates.start_step:  # the log is not there, or not whole
            earlier = []
        self.losses: list[float] = [row["loss"] for row in earlier]
        self.watch = StragglerWatch(job.prepared.mesh)
        self.metrics: dict[str, float] = {}
        self.evaluated_at, self.best, self.warned = -1, _best_before(options, about), False
        self.is_asked = False  # until all replicas are equal: see `Prepared.averaging`
        self.saving = Saving(self.saver, self.prepared, updates, options, display, self.log)
        now = [row for row in earlier if row["epoch"] == self.epoch]
        self.in_epoch = [float(sum(row["loss"] * row["terms"] for row in now)), float(sum(row["terms"] for row in now))]

    def run(self) -> dict[str, Any]:
        """All updates that are left, evaluations and checkpoints between them; what comes of it, as fields of a Record.

        Raises `StoppedError` after a request to stop, `NotFiniteError` for a loss that is none, `DivergedError` for
        replicas that are not equal.
        """
        startup_seconds = time.time() - self.options.started
        world, begin = self.prepared.world, self.updates.start_step
        try:
            with resource_log(_resource_file(self.options, world), host_name(), goes_on=begin > 0):
                if not self.updates.is_over:
                    self._update(self.updates, begin)
                metrics = self._at_end(self.done)
        finally:
            self.display.end()
            if self.log is not None:
                self.log.close()
        if self.log is not None and self.log.gone:
            raise EveryrankError(
                f"{self.options.out}: {', '.join(self.log.gone)} were taken away while the training ran"
            )
        step = self.meter.step_seconds(self.done) if self.options.profile is None else None  # the profiler slows one
        epoch = None if is_uncounted(self.job.train_data) else epoch_of(self.prepared.workload, self.job.train_data)
        return {
            "throughput_samples_per_second": self.meter.throughput(self.done) if step else None,
            "step_seconds": step,
            "epoch_seconds": step.median * epoch.updates if step and epoch else None,
            "checkpoint_stall_seconds": interval(self.saver.stalls) if self.saver and self.saver.stalls else None,
            "startup_seconds": startup_seconds,
            "memberships": self.log.memberships.rows if self.log is not None else [],
            "first_step_seconds": self.meter.first_step_seconds,
            "loss": self.losses,
            "metrics": metrics,
        }

    def _update(self, updates: Updates, begin: int) -> None:
        shares = self._shares(updates, begin)
        waiting: list[DoneUpdate] = []
        look_every = 1
        rate = self._rate()
        self.meter.start()
        self.looked_at = time.perf_counter()
        try:
            for share, update in zip(shares, updates, strict=True):
                waiting.append(DoneUpdate(update, share, rate))
                rate = self._rate()
                done = self.done = update.step + 1
                self.epoch = update.epoch
                if update.step == begin:
                    float(share[0])  # on CUDA this waits until the first update is done
                    self.meter.first()
                self.saving.compare_every(done)
                is_last = updates.is_last(done)
                is_due = self._is_due(done)
                if len(waiting) >= look_every or is_last or is_due:
                    is_asked, look_every = self._look(waiting)
                    self.meter.look()
                    self.display.show(done, self.losses[-1], self.meter.speed(done))
                    if is_due and not is_last:
                        with self.meter.pause():
                            self._between(done)
                        rate = self._rate()  # a plateau may have been found
                        self.looked_at = time.perf_counter()
                    self.is_asked = self.is_asked or is_asked
                    if self.is_asked and not is_last and self.prepared.are_replicas_equal:
                        self.saving.stopped(done, self._metrics(done))
                    look_every = 1 if self.is_asked else look_every
        except (NotFiniteError, DivergedError):
            if waiting:
                self._look(waiting)  # every rank comes here: the good losses before the bad one are not lost
            if self.saver is not None:
                self.saver.finish_or_say()  # nor the checkpoint that is being written
            raise

    def _shares(self, updates: Updates, begin: int) -> Iterator[Tensor]:
        """The share of each update on this rank as it is done, with what was asked for around it."""
        shares = run_updates(self.prepared, self.job.train_data, updates, fetched=self.watch.fetched)
        if self.options.profile is not None:
            # of a number that nobody knows the first one comes for certain
            step = min(_PROFILED_UPDATE, updates.end - begin - 1) if updates.end is not None else 0
            shares = with_one_profiled(shares, step, self.prepared.trainable, self.prepared.world, self.options.profile)
        if self.options.before_update is not None:
            shares = _with_hook(shares, self.options.before_update, self.prepared, begin)
        return shares

    def _rate(self) -> float:
        """The learning rate of the next update; of the first group where they differ."""
        rate = self.prepared.trainable.optimizer.param_groups[0].get("lr")
        return rate if isinstance(rate, float | int) else math.nan

    def _look(self, waiting: list[DoneUpdate]) -> tuple[bool, int]:
        """Add up the waiting losses over ranks; whether a rank was asked to stop, and after how many to look next."""
        seconds = (time.perf_counter() - self.looked_at) / len(waiting)
        self.looked_at = time.perf_counter()
        next_look = max(1, min(_MOST_UPDATES, int(_LOOK_SECONDS / max(seconds, 1e-9))))
        # the first rank's clock counts; its numbers travel as one: a longer table is cut elsewhere, and its sums would
        # be rounded in another order
        save_every = self.saving.suggest(self.meter.seconds / max(1, self.done - 1 - self.meter.begin))
        own = next_look + _APART * (self.watch.is_due() + 2 * save_every)
        world = self.prepared.world
        rows, (num_asked, said) = add_up(waiting, (self.stop.asked is not None, own if world.rank == 0 else 0), world)
        said, next_look = divmod(int(said), _APART)
        save_every, is_due = divmod(said, 2)
        self.saving.agree(save_every)
        if is_due:
            self.watch.look_and_tell(waiting[-1].update.step + 1, self.display, self.log)
        looked_at = list(waiting)
        waiting.clear()
        for done, (total, count) in zip(looked_at, rows, strict=True):
            self._note(done, total, count)
        if self.log is not None:
            self.log.flush()
            if self.log.trouble and not self.warned:
                self.warned = True
                self.display.line(f"the log cannot be written ({self.log.trouble}); the training goes on")
        return num_asked > 0, next_look

    def _note(self, done: DoneUpdate, total: float, count: float) -> None:
        update = done.update
        if count == 0:
            raise WorkloadError(f"update {update.step}: the loss counted 0 terms over all ranks")
        loss = total / count
        if not math.isfinite(loss):
            raise nonfinite_loss_error(self.prepared, update.step, loss)
        self.losses.append(loss)
        self.in_epoch[0] += total
        self.in_epoch[1] += count
        if self.log is not None:
            row = {"step": update.step, "epoch": update.epoch, "loss": loss, "lr": done.rate, "terms": count}
            self.log.update({**row, "time": time.time()})

    def _metrics(self, done: int) -> dict[str, float]:
        """Those of this very state; {} where it was not evaluated."""
        return self.metrics if self.evaluated_at == done else {}

    def _is_due(self, done: int) -> bool:
        """Whether something stands between this update and the next."""
        return self.updates.ends_epoch(done) or self._evaluates_at(done) or self.saving.is_due(done)

    def _evaluates_at(self, done: int) -> bool:
        if self.prepared.trainable.follows_evaluation and self.updates.ends_epoch(done):
            return True
        return self.job.eval_data is not None and is_every(self.options.evaluate_every, done, self.updates)

    def _between(self, done: int) -> None:
        """What stands between two updates. An evaluation comes last: what raises in it must not lose the epoch."""
        check_finite(self.prepared, done)
        # a schedule that listens to the evaluation is saved when it has heard, or a resumed one would not know of it
        is_saved = self.saving.is_due(done) and not self.prepared.trainable.follows_evaluation
        if is_saved:
            self.saving.save(done, self._metrics(done))
        is_better_one = self._evaluates_at(done) and self._evaluate(done)
        if self.updates.ends_epoch(done):
            self._end_epoch(done)
        if self.saver is not None and not is_saved and (is_better_one or self.saving.is_due(done)):
            self.saving.owes = True
            if self.prepared.are_replicas_equal:
                self.saving.save(done, self._metrics(done))

    def _evaluate(self, done: int) -> bool:
        """Evaluate; whether this is the best so far. A checkpoint of this very state learns how good it is."""
        start = time.perf_counter()
        try:
            self.metrics = evaluate_job(self.job)
        except Exception:
            if self.saver is not None:
                with contextlib.suppress(SaveError):  # every rank comes to its end, whichever of them has failed
                    self.saver.finish()
            raise
        self.evaluated_at = done
        if self.saver is not None and self.saver.last_saved == done:
            self.saver.score(done, self.metrics)
        if self.log is not None:
            self.log.event({"step": done, "evaluation": self.metrics, "seconds": time.perf_counter() - start})
        if self.saver is None:
            return False
        best_by = self.saver.about.best_by
        score = self.metrics.get(best_by.partition(":")[0])
        if not is_better(score, self.best, best_by):
            return False
        self.best = score
        return True

    def _end_epoch(self, done: int) -> None:
        (total, count), self.in_epoch = self.in_epoch, [0.0, 0.0]
        mean, seconds = total / count if count else math.nan, self.meter.epoch()
        now = self.metrics if self.evaluated_at == done else {}
        self.prepared.trainable.report_eval_loss(now.get("eval_loss"))
        if self.log is not None:
            row = {"step": done, "epoch": self.epoch, "epoch_seconds": seconds, "mean_loss": mean, "evaluation": now}
            self.log.event({**row, "time": time.time()})
            self.log.flush()
        if not self.updates.is_last(done):
            rest = f", {format_metrics(now)}" if now else ""
            self.display.line(f"epoch {self.epoch} · {done} updates · {seconds:.1f} s · loss {mean:.4f}{rest}")
        after_epoch(self.prepared, self.epoch, now)

    def _at_end(self, end: int) -> dict[str, float]:
        """The last evaluation and the last checkpoint."""
        failure: EveryrankError | None = None
        with self.meter.pause():
            check_finite(self.prepared, end)
            self.saving.compare(end)
            if self.prepared.averaging is not None and not self.prepared.averaging.are_equal:
                self.prepared.averaging.average()
            is_due = self.saver is not None and self.saver.last_saved != end and self.meter.begin < end
            if is_due and not self.prepared.trainable.follows_evaluation:
                try:
                    self.saving.save(end, self._metrics(end), is_last=True)
                except EveryrankError as error:  # how good the model is, is worth to know all the more
                    failure = error
            if self.job.eval_data is not None and self.evaluated_at != end:
                self._evaluate(end)
            if self.meter.begin < end and self.updates.ends_epoch(end):
                self._end_epoch(end)
            if failure is not None:
                raise failure
            if is_due and self.prepared.trainable.follows_evaluation:
                self.saving.save(end, self._metrics(end), is_last=True)
            elif self.saver is not None:
                self.saver.finish_or_say()
        if self.log is not None:
            self.log.final(self.metrics)
        return self.metrics


def _best_before(options: TrainOptions, about: About) -> float | None:
    """How good the best checkpoint is of the run that goes on; None where there is none."""
    best = best_of(checkpoints_of(options.resume.parent.parent), about.best_by) if options.resume else None
    return score_of(best, about.best_by) if best is not None else None


def _resource_file(options: TrainOptions, world: World) -> Path | None:
    """Where the first rank of each host writes what that host uses; None in all other ranks, and without a folder."""
    if options.out is None or world.local_rank != 0 or not options.out.is_dir():  # a host may not share it
        return None
    return options.out / ("resources.csv" if world.rank == 0 else f"resources-rank{world.rank}.csv")


def _with_hook(
    shares: Iterator[Tensor], before_update: Callable[[Prepared, int], None], prepared: Prepared, begin: int
) -> Iterator[Tensor]:
    """The same shares; `before_update` is called before each is made (and once where no update is left)."""
    for number in itertools.count(begin):
        before_update(prepared, number)
        if (share := next(shares, None)) is None:
            return
        yield share


# --- what the ranks tell each other every few updates: their shares of the losses, and a few notes


class DoneUpdate(NamedTuple):
    """An update that is done, whose losses nobody has looked at yet: its share, and the learning rate."""

    update: Update
    share: Tensor
    rate: float


def add_up(
    waiting: Sequence[DoneUpdate], notes: tuple[float, float], world: World
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """(sum, count) of each update over all ranks, and the sums of what each rank notes. One collective.

    Shares are float64 of shape (2,), on the rank's device.
    """
    shares = [done.share for done in waiting]
    own = torch.tensor([notes], dtype=torch.float64, device=shares[0].device)
    *rows, told = sum_over_ranks(torch.cat([torch.stack(shares), own]), world).tolist()
    return rows, told
