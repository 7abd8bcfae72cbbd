"""The loop: feed a prepared strategy, keep its shares, evaluate, and make a Record of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from everyrank.collectives import sum_over_ranks
from everyrank.data import Batch, Update, all_updates, batches_for_evaluation, batches_for_updates, updates_per_epoch
from everyrank.data.loader import map_tensors, mix
from everyrank.errors import EveryrankError, NotFiniteError, UsageError, WorkloadError, describe
from everyrank.launch import Launch, RankFacts
from everyrank.layout import Layout
from everyrank.measure.provenance import provenance
from everyrank.options import TrainOptions
from everyrank.parallel.build import call, compute_dtype
from everyrank.parallel.shard import local_tensors
from everyrank.record import Interval, Record
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World, open_world

__all__ = [
    "blame_workload",
    "evaluate",
    "open_data",
    "planned_updates",
    "restore",
    "run_updates",
    "snapshot",
    "train_rank",
]

_FLUSH_EVERY = 10  # updates between two looks at the loss: adding it up over ranks costs a collective


@contextlib.contextmanager
def blame_workload() -> Iterator[None]:
    """Turn an exception out of a person's code into a `WorkloadError` of one line. For before the first update."""
    try:
        yield
    except (EveryrankError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise WorkloadError(describe(error)) from error


def open_data(workload: Workload, num_readers: int) -> tuple[Any, Any]:
    """The training and the evaluation data (None without). Raises `WorkloadError` for data that cannot be cut."""
    with blame_workload():
        train_data = workload.train_data()
        eval_data = workload.eval_data() if workload.eval_data else None
    for name, data in (("train_data", train_data), ("eval_data", eval_data)):
        if data is None and name == "eval_data":
            continue
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            kind = type(data).__name__
            raise WorkloadError(f"{name}: {kind} is not map-style; give a dataset with __len__ and __getitem__")
        if len(data) == 0:
            raise WorkloadError(f"{name}: the dataset is empty")
    if len(train_data) < num_readers:
        raise WorkloadError(
            f"{num_readers} ranks read, but train_data has {len(train_data)} samples; use --processes {len(train_data)}"
        )
    return train_data, eval_data


def planned_updates(workload: Workload, length: int) -> int:
    """How many updates the workload's `epochs` or `steps` come to."""
    if workload.steps is not None:
        return workload.steps
    return (workload.epochs or 1) * updates_per_epoch(length, workload.global_batch)


def run_updates(
    workload: Workload,
    dataset: Any,
    layout: Layout,
    world: World,
    prepared: Prepared,
    updates: Iterable[Update],
    reverse: bool = False,
    after: Callable[[Update, Tensor], None] | None = None,
) -> Iterator[Tensor]:
    """Do the updates in order; yield this rank's share of (sum, count) after each.

    The generator is the loop: whoever takes its values decides what happens between two updates, and nothing does
    unless they say so. `after` is for tests. Raises `NotFiniteError` with the update and the first bad tensor.
    """
    updates = list(updates)
    batches = batches_for_updates(
        workload, dataset, updates, prepared.reads, layout.accumulate, world, compute_dtype(layout), reverse
    )
    for update in updates:
        first = update is updates[0]
        with blame_workload() if first else contextlib.nullcontext():
            micro_batches = next(batches)
            _seed_update(workload, update, prepared, world)
            try:
                share = prepared.step(micro_batches)
            except NotFiniteError as error:
                where = first_bad_tensor(prepared.model, micro_batches[0])
                raise NotFiniteError(f"update {update.step}: {error}; first bad tensor: {where}") from None
            except WorkloadError as error:
                raise WorkloadError(f"update {update.step}: {error}") from error.__cause__
        if after is not None:
            after(update, share)
        yield share


def _seed_update(workload: Workload, update: Update, prepared: Prepared, world: World) -> None:
    """Make dropout a function of (seed, step, rank)."""
    seed = mix(workload.seed, update.step, prepared.reads.index)
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def first_bad_tensor(model: nn.Module, batch: Batch) -> str:
    """The first tensor that is not finite: a parameter, the input, or the output of a module. A collective."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if _is_bad(output):
                found.append(f"output of {name or 'the model'} ({type(module).__name__})")

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            call(model, batch.input)  # every rank comes here: a sharded model gathers while it runs
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in model.named_parameters():
        if _is_bad(local_tensors([parameter])[0]):
            return f"parameter {name}, which the update before made so; lower the learning rate or set clip_norm"
    if _is_bad(batch.input):
        return "the input itself"
    return found[0] if found else "the loss itself; the model's output is finite"


def _is_bad(value: Any) -> bool:
    bad: list[bool] = []
    map_tensors(value, lambda tensor: bad.append(not bool(tensor.isfinite().all())) or tensor)
    return any(bad)


def evaluate(
    workload: Workload, dataset: Any, layout: Layout, world: World, prepared: Prepared
) -> dict[str, tuple[float, float]]:
    """Exact (sum, count) over all ranks of the loss and each metric. Every sample counts once. A collective."""
    shares = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    prepared.model.eval()
    with torch.no_grad():
        for batch in batches_for_evaluation(workload, dataset, prepared.reads, world, compute_dtype(layout)):
            shares += prepared.evaluate(batch)
    prepared.model.train()
    total = shares if prepared.reads.count == 1 else sum_over_ranks(shares, world)
    names = ["loss", *workload.metrics]
    return {name: (float(total[row, 0]), float(total[row, 1])) for row, name in enumerate(names)}


def snapshot(prepared: Prepared) -> dict[str, Any]:
    """A copy of all that training changes in this rank."""
    tensors = [*prepared.model.parameters(), *prepared.model.buffers()]
    return {
        "tensors": [tensor.detach().clone() for tensor in local_tensors(list(tensors))],
        "optimizer": copy.deepcopy(prepared.optimizer.state_dict()),
        "schedule": copy.deepcopy(prepared.schedule.state_dict()) if prepared.schedule else None,
        "scale": dataclasses.replace(prepared.scale) if prepared.scale else None,
    }


@torch.no_grad()
def restore(prepared: Prepared, saved: dict[str, Any]) -> None:
    """Put the copy back."""
    tensors = local_tensors([*prepared.model.parameters(), *prepared.model.buffers()])
    for tensor, copied in zip(tensors, saved["tensors"], strict=True):
        tensor.copy_(copied)
    prepared.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    if prepared.schedule is not None:
        prepared.schedule.load_state_dict(copy.deepcopy(saved["schedule"]))
    if prepared.scale is not None:
        prepared.scale.scale, prepared.scale.good_steps = saved["scale"].scale, saved["scale"].good_steps


def train_rank(
    facts: RankFacts, what: Source | Workload, layout: Layout, launch: Launch, options: TrainOptions
) -> Record | None:
    """Train in this rank; the Record on rank 0, None elsewhere."""
    layout.mesh(facts.size)
    if layout.axis is None and layout.strategy == "single" and facts.size > 1:
        raise UsageError(f"layout {layout} runs in one process, but there are {facts.size}; use --processes 1")
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


def mean_metrics(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The mean of each exact sum; the loss of the evaluation data is called eval_loss."""
    means = {name: total / count for name, (total, count) in metrics.items() if count}
    return {("eval_loss" if name == "loss" else name): value for name, value in means.items()}


class _Watch:
    """A training as a person follows it: progress bar, losses, log. Only rank 0 shows and writes."""

    def __init__(
        self, workload: Workload, dataset: Any, layout: Layout, world: World, prepared: Prepared, options: TrainOptions
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
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    def __enter__(self) -> None:
        if self.is_first and self.options.out is not None:
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
        shares = run_updates(
            self.workload, self.dataset, self.layout, self.world, self.prepared, updates
        )
        for update, share in zip(updates, shares, strict=True):
            waiting.append((update, share))
            if update.step == 0:
                float(share[0])  # on CUDA this waits until the first update is done
                self.first_step_seconds = time.perf_counter() - start
            if len(waiting) == _FLUSH_EVERY or update is updates[-1]:
                self._flush(waiting)
                waiting = []
                self.seconds = time.perf_counter() - start - self.first_step_seconds
                speed = self._samples(1, update.step + 1) / self.seconds if update.step else 0.0
                self.progress.update(
                    task, completed=update.step + 1, loss=f"loss {self.losses[-1]:.4f}", speed=f"{speed:,.0f} samples/s"
                )

    def _flush(self, waiting: list[tuple[Update, Tensor]]) -> None:
        shares = torch.stack([share for _, share in waiting])
        totals = shares if self.prepared.reads.count == 1 else sum_over_ranks(shares, self.world)
        for (update, _), (total, count) in zip(waiting, totals.tolist(), strict=True):
            loss = total / count if count else math.nan
            if not math.isfinite(loss):
                bad = [n for n, p in self.prepared.model.named_parameters() if _is_bad(local_tensors([p])[0])]
                where = f"parameter {bad[0]}" if bad else "the loss itself"
                raise NotFiniteError(f"update {update.step}: the loss is {loss}; first bad tensor: {where}")
            self.losses.append(loss)
            if self.log is not None:
                row = {"step": update.step, "epoch": update.epoch, "loss": loss, "terms": count, "time": time.time()}
                self.log.write(json.dumps(row) + "\n")
        if self.log is not None:
            self.log.flush()

    def _samples(self, first: int, end: int) -> int:
        """Samples read by updates `first` to `end - 1`."""
        length, batch = len(self.dataset), self.workload.global_batch

        def until(step: int) -> int:
            return step // self.per_epoch * length + min(step % self.per_epoch * batch, length)

        return until(end) - until(first)

    def throughput(self) -> Interval | None:
        """Samples a second over all updates but the first."""
        if self.num_updates < 2:
            return None
        return _once(self._samples(1, self.num_updates) / self.seconds)

    def step_seconds(self) -> Interval | None:
        """Seconds of an update, over all but the first."""
        return _once(self.seconds / (self.num_updates - 1)) if self.num_updates > 1 else None

    def epoch_seconds(self) -> float | None:
        """Seconds of an epoch at that speed."""
        return self.seconds / (self.num_updates - 1) * self.per_epoch if self.num_updates > 1 else None

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
