"""Train: a run as a person follows it. Progress bar, losses, log, and the Record of it."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from everyrank.collectives import sum_over_ranks
from everyrank.data import Update, all_updates, samples_before, updates_per_epoch
from everyrank.errors import NotFiniteError, WorkloadError
from everyrank.launch import Launch, RankFacts
from everyrank.layout import Layout
from everyrank.loop import blame_workload, evaluate, is_bad, mean_metrics, open_data, planned_updates, run_updates
from everyrank.measure.provenance import provenance
from everyrank.measure.timeline import with_one_profiled
from everyrank.options import TrainOptions
from everyrank.parallel.shard import local_tensors
from everyrank.record import Interval, Record
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World, open_world

__all__ = ["train_rank"]

_PROFILED_UPDATE = 10  # by then every buffer is made and every bucket rebuilt
_FLUSH_EVERY = 10  # updates between two looks at the loss: adding it up over ranks costs a collective


def train_rank(
    facts: RankFacts, what: Source | Workload, layout: Layout, launch: Launch, options: TrainOptions
) -> Record | None:
    """Train in this rank; the Record on rank 0, None elsewhere."""
    with open_world(facts, launch) as world:
        workload = load(what)
        if options.epochs is not None or options.steps is not None:
            workload = dataclasses.replace(workload, epochs=options.epochs, steps=options.steps)
        train_data, eval_data = open_data(workload, world.size)
        with blame_workload():
            prepared = prepare(workload, layout, world)
        watch = _Watch(workload, train_data, layout, world, prepared, options)
        with watch:
            watch.run()
        metrics = evaluate(workload, eval_data, layout, world, prepared) if eval_data is not None else {}
        del prepared, watch.prepared
        if world.rank != 0:
            return None
        record = Record(
            workload=workload.name,
            layout=str(layout),
            launcher=facts.started_by,
            backend=world.backend,
            device=world.device.type,
            world_size=world.size,
            throughput_samples_per_second=watch.throughput(),
            step_seconds=watch.step_seconds(),
            epoch_seconds=watch.epoch_seconds(),
            startup_seconds=watch.startup_seconds,
            first_step_seconds=watch.first_step_seconds,
            loss=watch.losses,
            metrics=mean_metrics(metrics),
            provenance=provenance(workload, train_data, world, options.command),
        )
        watch.finish(record)
        return record


class _Watch:
    """A training as a person follows it: progress bar, losses, log. Only rank 0 shows and writes."""

    def __init__(
        self,
        workload: Workload,
        dataset: Any,
        layout: Layout,
        world: World,
        prepared: Prepared,
        options: TrainOptions,
    ) -> None:
        self.workload, self.dataset, self.layout, self.world = workload, dataset, layout, world
        self.prepared, self.options = prepared, options
        self.per_epoch = updates_per_epoch(len(dataset), workload.global_batch)
        self.num_updates = planned_updates(workload, len(dataset))
        self.losses: list[float] = []
        self.startup_seconds = 0.0
        self.first_step_seconds = 0.0
        self.seconds = 0.0  # of all updates after the first
        self.log: IO[str] | None = None
        self.is_first = world.rank == 0
        self.console = Console(quiet=not (self.is_first and options.show))
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> None:
        if self.is_first and self.options.out is not None:
            self.options.out.mkdir(parents=True, exist_ok=True)
            self.log = (self.options.out / "log.jsonl").open("w", encoding="utf-8")
        self.progress.start()

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.log is not None:
            self.log.close()

    def run(self) -> None:
        """All updates. The loss is looked at every few of them, in a collective of its own."""
        name = f"{self.workload.name} · {self.layout} · {self.world.size} rank{'s' * (self.world.size > 1)}"
        task = self.progress.add_task(name, total=self.num_updates, loss="", speed="")
        waiting: list[tuple[Update, Tensor]] = []
        updates = list(all_updates(self.num_updates, self.per_epoch))
        self.startup_seconds = time.time() - self.options.started
        start = time.perf_counter()
        shares = run_updates(self.workload, self.dataset, self.layout, self.world, self.prepared, updates)
        if self.options.profile is not None:
            step = min(_PROFILED_UPDATE, self.num_updates - 1)
            shares = with_one_profiled(shares, step, self.world, self.options.profile)
        try:
            for update, share in zip(updates, shares, strict=True):
                waiting.append((update, share))
                if update.step == 0:
                    float(share[0])  # on CUDA this waits until the first update is done
                    self.first_step_seconds = time.perf_counter() - start
                if len(waiting) == _FLUSH_EVERY or update is updates[-1]:
                    self._flush(waiting)
                    self.seconds = time.perf_counter() - start - self.first_step_seconds
                    self._show(task, update.step + 1)
        except NotFiniteError:
            if waiting:
                self._flush(waiting)  # every rank comes here: the good losses before the bad one are not lost
            raise

    def _show(self, task: TaskID, done: int) -> None:
        speed = self._samples(1, done) / self.seconds if done > 1 else 0.0
        loss = f"loss {self.losses[-1]:.4f}"
        self.progress.update(task, completed=done, loss=loss, speed=f"{speed:,.0f} samples/s")

    def _flush(self, waiting: list[tuple[Update, Tensor]]) -> None:
        shares = torch.stack([share for _, share in waiting])
        totals = shares if self.prepared.reads.count == 1 else sum_over_ranks(shares, self.world)
        updates = [update for update, _ in waiting]
        waiting.clear()
        for update, (total, count) in zip(updates, totals.tolist(), strict=True):
            if count == 0:
                raise WorkloadError(f"update {update.step}: the loss counted 0 terms over all ranks")
            loss = total / count
            if not math.isfinite(loss):
                bad = [n for n, p in self.prepared.model.named_parameters() if is_bad(local_tensors([p])[0])]
                where = f"parameter {bad[0]}" if bad else "the loss itself"
                raise NotFiniteError(f"update {update.step}: the loss is {loss}; first bad tensor: {where}")
            self.losses.append(loss)
            if self.log is not None:
                row = {
                    "step": update.step,
                    "epoch": update.epoch,
                    "loss": loss,
                    "terms": count,
                    "time": time.time(),
                }
                self.log.write(json.dumps(row) + "\n")
        if self.log is not None:
            self.log.flush()

    def _samples(self, first: int, end: int) -> int:
        """Samples read by updates `first` to `end - 1`."""
        sizes = (len(self.dataset), self.workload.global_batch)
        return samples_before(end, *sizes) - samples_before(first, *sizes)

    def throughput(self) -> Interval | None:
        """Samples a second over all updates but the first; nothing where the profiler slowed one of them."""
        if self.num_updates < 2 or self.options.profile is not None:
            return None
        return _once(self._samples(1, self.num_updates) / self.seconds)

    def step_seconds(self) -> Interval | None:
        """Seconds of an update, over all but the first."""
        speed = self.throughput()
        return _once(self.seconds / (self.num_updates - 1)) if speed else None

    def epoch_seconds(self) -> float | None:
        """Seconds of an epoch at that speed."""
        step = self.step_seconds()
        return step.median * self.per_epoch if step else None

    def finish(self, record: Record) -> None:
        """Say how it ended."""
        if self.log is not None:
            assert self.options.out is not None
            with (self.options.out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({"final": record.metrics}) + "\n")
        speed = record.throughput_samples_per_second
        parts = [f"{self.num_updates} updates", f"loss {self.losses[-1]:.6f}"]
        parts += [f"{speed.median:,.0f} samples/s"] if speed else []
        parts += [f"{name} {value:.4f}" for name, value in record.metrics.items()]
        self.console.print(
            f"{record.workload} · {record.layout} · {self.world.size} on {record.device} ({record.backend}): "
            + ", ".join(parts),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _once(value: float) -> Interval:
    return Interval(value, value, value, trials=1)
