"""The training loop: runs updates, and between them sums the losses, evaluates and saves checkpoints.

All ranks take the same decisions. A stop signal and rank 0's clock reach them in the all-reduce of the losses, which
happens every few updates.
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
from everyrank.launch.host_info import host_name
from everyrank.loop import run_updates
from everyrank.loop.finite import check_finite, nonfinite_loss_error
from everyrank.measure.clock import interval
from everyrank.measure.resource_log import resource_log
from everyrank.measure.timeline import with_one_profiled
from everyrank.options import TrainOptions
from everyrank.runs import CheckpointMetadata, best_of, checkpoints_of, is_better, score_of
from everyrank.strategies import Prepared
from everyrank.train.buffers import different_buffers
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

_PROFILED_UPDATE = 10  # late enough: buffers are allocated and DDP has rebuilt its buckets
_MAX_UPDATES_UNSUMMED = 10  # between two sums of the losses over ranks
_RADIX = 100  # more than _MAX_UPDATES_UNSUMMED: rank 0 packs several values into one number in this base
_SYNC_SECONDS = 0.25  # longest time between two sums; a stop request waits about as long


class Training:
    """Runs a training on this rank.

    losses    mean loss of each update; with those before a resumed checkpoint if the log has those
    metrics   of the latest evaluation
    """

    def __init__(
        self,
        job: TrainingJob,
        options: TrainOptions,
        metadata: CheckpointMetadata,
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
            self.saver = Saver(
                options.out, self.prepared, job.prepared.world, metadata, options.keep, options.save_async
            )
        earlier_rows, self.log = open_log(self.prepared, options, updates.start_step, display)
        earlier_rows = [row for row in earlier_rows if "loss" in row]
        if len(earlier_rows) != updates.start_step:  # the log is missing or incomplete
            earlier_rows = []
        self.losses: list[float] = [row["loss"] for row in earlier_rows]
        self.watch = StragglerWatch(job.prepared.mesh)
        self.metrics: dict[str, float] = {}
        self.evaluated_at, self.best, self.warned = -1, _earlier_best(options, metadata), False
        self.stop_requested = False  # until all replicas are equal: see `Prepared.averaging`
        self.saving = Saving(self.saver, self.prepared, updates, options, display, self.log)
        rows_of_epoch = [row for row in earlier_rows if row["epoch"] == self.epoch]
        total, count = (
            sum(row["loss"] * row["terms"] for row in rows_of_epoch),
            sum(row["terms"] for row in rows_of_epoch),
        )
        self.in_epoch = [float(total), float(count)]  # (sum, count) of the losses of the current epoch

    def run(self) -> dict[str, Any]:
        """Train to the end, with the evaluations and checkpoints that are due. Returns fields of a Record.

        Raises `StoppedError` after a stop request, `NotFiniteError` for a loss that is infinite or NaN, `DivergedError`
        for replicas that are not equal.
        """
        startup_seconds = time.time() - self.options.started
        world, start_step = self.prepared.world, self.updates.start_step
        try:
            with resource_log(_resource_file(self.options, world), host_name(), is_resumed=start_step > 0):
                if not self.updates.is_over:
                    self._run_updates(self.updates, start_step)
                metrics = self._finish(self.done)
        finally:
            self.display.end()
            if self.log is not None:
                self.log.close()
        if self.log is not None and self.log.gone:
            raise EveryrankError(f"{self.options.out}: {', '.join(self.log.gone)} were removed during the training")
        step_seconds = (
            self.meter.step_seconds(self.done) if self.options.profile is None else None
        )  # the profiler slows one update
        epoch = None if is_uncounted(self.job.train_data) else epoch_of(self.prepared.workload, self.job.train_data)
        return {
            "throughput_samples_per_second": self.meter.throughput(self.done) if step_seconds else None,
            "step_seconds": step_seconds,
            "epoch_seconds": step_seconds.median * epoch.updates if step_seconds and epoch else None,
            "checkpoint_stall_seconds": interval(self.saver.stalls) if self.saver and self.saver.stalls else None,
            "startup_seconds": startup_seconds,
            "memberships": self.log.memberships.rows if self.log is not None else [],
            "first_step_seconds": self.meter.first_step_seconds,
            "loss": self.losses,
            "metrics": metrics,
        }

    def _run_updates(self, updates: Updates, start_step: int) -> None:
        shares = self._shares(updates, start_step)
        waiting: list[DoneUpdate] = []
        sync_every = 1
        rate = self._rate()
        self.meter.start()
        self.synced_at = time.perf_counter()
        try:
            for share, update in zip(shares, updates, strict=True):
                waiting.append(DoneUpdate(update, share, rate))
                rate = self._rate()
                done = self.done = update.step + 1
                self.epoch = update.epoch
                if update.step == start_step:
                    float(share[0])  # on CUDA this waits until the first update is done
                    self.meter.first()
                    with self.meter.pause():
                        self._report_buffers()
                self.saving.compare_every(done)
                is_last = updates.is_last(done)
                is_due = self._is_due(done)
                if len(waiting) >= sync_every or is_last or is_due:
                    stop_requested, sync_every = self._sync_losses(waiting)
                    self.meter.update()
                    self.display.show(done, self.losses[-1], self.meter.speed(done))
                    if is_due and not is_last:
                        with self.meter.pause():
                            self._run_due_actions(done)
                        rate = self._rate()  # the schedule may have lowered it on a plateau
                        self.synced_at = time.perf_counter()
                    self.stop_requested = self.stop_requested or stop_requested
                    if self.stop_requested and not is_last and self.prepared.are_replicas_equal:
                        self.saving.stopped(done, self._metrics(done))
                    sync_every = 1 if self.stop_requested else sync_every
        except (NotFiniteError, DivergedError):
            if waiting:
                self._sync_losses(waiting)  # the error is raised on all ranks; log the finite losses before it
            if self.saver is not None:
                self.saver.finish_or_report()  # complete the checkpoint that is being written
            raise

    def _report_buffers(self) -> None:
        """Print the first buffer that differs between the ranks. A collective, called after the first update."""
        names = different_buffers(self.prepared)
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            self.display.line(
                f"buffer {names[0]}{others} differs between ranks: the model writes it in forward from samples or "
                "random numbers of one rank, so this is not the training of one device; check it with everyrank verify"
            )

    def _shares(self, updates: Updates, start_step: int) -> Iterator[Tensor]:
        """Run the updates, with the profiler and `before_update` if requested; yield this rank's loss (sum, count)."""
        shares = run_updates(self.prepared, self.job.train_data, updates, fetched=self.watch.add_loading_time)
        if self.options.profile is not None:
            # if the number of updates is unknown, only the first one is certain to run
            step = min(_PROFILED_UPDATE, updates.end - start_step - 1) if updates.end is not None else 0
            shares = with_one_profiled(shares, step, self.prepared.trainable, self.prepared.world, self.options.profile)
        if self.options.before_update is not None:
            shares = _with_before_update(shares, self.options.before_update, self.prepared, start_step)
        return shares

    def _rate(self) -> float:
        """Return the learning rate of the next update, that of the first parameter group."""
        rate = self.prepared.trainable.optimizer.param_groups[0].get("lr")
        return float(rate) if isinstance(rate, float | int | Tensor) else math.nan

    def _sync_losses(self, waiting: list[DoneUpdate]) -> tuple[bool, int]:
        """Sum the waiting losses over ranks. Returns whether to stop, and the number of updates until the next sum."""
        seconds = (time.perf_counter() - self.synced_at) / len(waiting)
        self.synced_at = time.perf_counter()
        updates_until_sync = max(1, min(_MAX_UPDATES_UNSUMMED, int(_SYNC_SECONDS / max(seconds, 1e-9))))
        # Rank 0's clock decides. Its values are packed into one number: a longer tensor would be split differently by
        # the all-reduce, which would round the sums differently.
        save_every = self.saving.suggest(self.meter.seconds / max(1, self.done - 1 - self.meter.start_step))
        local_note = updates_until_sync + _RADIX * (self.watch.is_due() + 2 * save_every)
        world = self.prepared.world
        rows, (num_stop_requests, note) = sum_losses(
            waiting, (self.stop.asked is not None, local_note if world.rank == 0 else 0), world
        )
        note, updates_until_sync = divmod(int(note), _RADIX)
        save_every, is_due = divmod(note, 2)
        self.saving.agree(save_every)
        if is_due:
            self.watch.report_if_slow(waiting[-1].update.step + 1, self.display, self.log)
        synced = list(waiting)
        waiting.clear()
        for done_update, (total, count) in zip(synced, rows, strict=True):
            self._record_loss(done_update, total, count)
        if self.log is not None:
            self.log.flush()
            if self.log.write_error and not self.warned:
                self.warned = True
                self.display.line(f"the log cannot be written ({self.log.write_error}); the training continues")
        return num_stop_requests > 0, updates_until_sync

    def _record_loss(self, done_update: DoneUpdate, total: float, count: float) -> None:
        update = done_update.update
        if count == 0:
            raise WorkloadError(f"update {update.step}: the loss counted 0 terms over all ranks")
        loss = total / count
        if not math.isfinite(loss):
            raise nonfinite_loss_error(self.prepared, update.step, loss)
        self.losses.append(loss)
        self.in_epoch[0] += total
        self.in_epoch[1] += count
        if self.log is not None:
            row = {"step": update.step, "epoch": update.epoch, "loss": loss, "lr": done_update.rate, "terms": count}
            self.log.update({**row, "time": time.time()})

    def _metrics(self, done: int) -> dict[str, float]:
        """Return the metrics of the current weights, {} if they have not been evaluated."""
        return self.metrics if self.evaluated_at == done else {}

    def _is_due(self, done: int) -> bool:
        """Return whether an evaluation, a checkpoint or the end of an epoch is due after this update."""
        return self.updates.ends_epoch(done) or self._evaluates_at(done) or self.saving.is_due(done)

    def _evaluates_at(self, done: int) -> bool:
        if self.prepared.trainable.follows_evaluation and self.updates.ends_epoch(done):
            return True
        return self.job.eval_data is not None and is_every(self.options.evaluate_every, done, self.updates)

    def _run_due_actions(self, done: int) -> None:
        """Save, evaluate and end the epoch where due. Saving comes first, because an evaluation may fail."""
        check_finite(self.prepared, done)
        # a schedule that uses the evaluation, for example ReduceLROnPlateau, is saved after it has seen the metrics
        is_saved = self.saving.is_due(done) and not self.prepared.trainable.follows_evaluation
        if is_saved:
            self.saving.save(done, self._metrics(done))
        is_best = self._evaluates_at(done) and self._evaluate(done)
        if self.updates.ends_epoch(done):
            self._end_epoch(done)
        if self.saver is not None and not is_saved and (is_best or self.saving.is_due(done)):
            self.saving.checkpoint_pending = True
            if self.prepared.are_replicas_equal:
                self.saving.save(done, self._metrics(done))

    def _evaluate(self, done: int) -> bool:
        """Evaluate, add the metrics to a checkpoint of these weights, and return whether they are the best so far."""
        start = time.perf_counter()
        try:
            self.metrics = evaluate_job(self.job)
        except Exception:
            if self.saver is not None:
                with contextlib.suppress(SaveError):  # complete the checkpoint on every rank, whichever rank has failed
                    self.saver.finish()
            raise
        self.evaluated_at = done
        if self.saver is not None and self.saver.last_saved == done:
            self.saver.score(done, self.metrics)
        if self.log is not None:
            self.log.event({"step": done, "evaluation": self.metrics, "seconds": time.perf_counter() - start})
        if self.saver is None:
            return False
        best_by = self.saver.metadata.best_by
        score = self.metrics.get(best_by.partition(":")[0])
        if not is_better(score, self.best, best_by):
            return False
        self.best = score
        return True

    def _end_epoch(self, done: int) -> None:
        (total, count), self.in_epoch = self.in_epoch, [0.0, 0.0]
        mean, seconds = total / count if count else math.nan, self.meter.epoch()
        metrics = self.metrics if self.evaluated_at == done else {}
        self.prepared.trainable.report_eval_loss(metrics.get("eval_loss"))
        if self.log is not None:
            row = {
                "step": done,
                "epoch": self.epoch,
                "epoch_seconds": seconds,
                "mean_loss": mean,
                "evaluation": metrics,
            }
            self.log.event({**row, "time": time.time()})
            self.log.flush()
        if not self.updates.is_last(done):
            metrics_text = f", {format_metrics(metrics)}" if metrics else ""
            self.display.line(f"epoch {self.epoch} · {done} updates · {seconds:.1f} s · loss {mean:.4f}{metrics_text}")
        after_epoch(self.prepared, self.epoch, metrics)

    def _finish(self, end: int) -> dict[str, float]:
        """Run the last evaluation and save the last checkpoint. Returns the metrics."""
        failure: EveryrankError | None = None
        with self.meter.pause():
            check_finite(self.prepared, end)
            self.saving.compare(end)
            if self.prepared.averaging is not None and not self.prepared.averaging.are_equal:
                self.prepared.averaging.average()
            is_due = self.saver is not None and self.saver.last_saved != end and self.meter.start_step < end
            if is_due and not self.prepared.trainable.follows_evaluation:
                try:
                    self.saving.save(end, self._metrics(end), is_last=True)
                except (
                    EveryrankError
                ) as error:  # still evaluate: without a checkpoint, the metrics are all that is left
                    failure = error
            if self.job.eval_data is not None and self.evaluated_at != end:
                self._evaluate(end)
            if self.meter.start_step < end and self.updates.ends_epoch(end):
                self._end_epoch(end)
            if failure is not None:
                raise failure
            if is_due and self.prepared.trainable.follows_evaluation:
                self.saving.save(end, self._metrics(end), is_last=True)
            elif self.saver is not None:
                self.saver.finish_or_report()
        if self.log is not None:
            self.log.final(self.metrics)
        return self.metrics


def _earlier_best(options: TrainOptions, metadata: CheckpointMetadata) -> float | None:
    """Return the best score of the resumed run, None without one."""
    best = best_of(checkpoints_of(options.resume.parent.parent), metadata.best_by) if options.resume else None
    return score_of(best, metadata.best_by) if best is not None else None


def _resource_file(options: TrainOptions, world: World) -> Path | None:
    """Return the file for the resource log of this host, on its local rank 0; None on the other ranks."""
    if options.out is None or world.local_rank != 0 or not options.out.is_dir():  # a host may not mount the folder
        return None
    return options.out / ("resources.csv" if world.rank == 0 else f"resources-rank{world.rank}.csv")


def _with_before_update(
    shares: Iterator[Tensor], before_update: Callable[[Prepared, int], None], prepared: Prepared, start_step: int
) -> Iterator[Tensor]:
    """Yield the loss (sum, count) of each update. Call `before_update` before each, and once more at the end."""
    for number in itertools.count(start_step):
        before_update(prepared, number)
        if (share := next(shares, None)) is None:
            return
        yield share


# --- sums of the losses over ranks


class DoneUpdate(NamedTuple):
    """An update whose loss is not yet summed over ranks: this rank's (sum, count), and its learning rate."""

    update: Update
    share: Tensor
    rate: float


def sum_losses(
    waiting: Sequence[DoneUpdate], notes: tuple[float, float], world: World
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Return (sum, count) of each update over all ranks, and the sums of the notes of all ranks. One collective.

    Shares are float64 of shape (2,), on the rank's device.
    """
    shares = [done.share for done in waiting]
    local_notes = torch.tensor([notes], dtype=torch.float64, device=shares[0].device)
    *rows, summed_notes = sum_over_ranks(torch.cat([torch.stack(shares), local_notes]), world).tolist()
    return rows, summed_notes
