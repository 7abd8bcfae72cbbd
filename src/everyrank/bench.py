"""Bench: the layouts side by side. Only what was checked equal gets a number.

1. Each layout is compared with `single` (parity.py).
2. Each is looked into under instruments: peak memory, what travels, exposed communication (measure/inside.py).
3. Each arm trains once from its initial state: its losses, its metrics, and the warm-up. This run is not timed.
4. The arms take turns, A B C A B C ...; before each trial the initial state is put back, outside the timed region.
   After each trial the same arm runs a shorter one that takes its steps apart (measure/split.py).

Inside the timed region is the loop and nothing else: no reading of the loss, no barrier, no metric, no print.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.collectives import gather, sum_over_ranks
from everyrank.data import all_updates, samples_before, samples_per_epoch, updates_per_epoch
from everyrank.errors import NotFiniteError
from everyrank.launch import Launch, RankFacts
from everyrank.layout import Layout
from everyrank.loop import evaluate, mean_metrics, open_data, planned_updates, restore, run_updates, snapshot
from everyrank.measure.clock import interval, now
from everyrank.measure.inside import Inside, look_inside
from everyrank.measure.provenance import provenance
from everyrank.measure.resources import sampling
from everyrank.measure.split import PHASES, breakdown, phases
from everyrank.options import BenchOptions
from everyrank.parity import check_layout, subject_of
from everyrank.progress import progress
from everyrank.record import Bubble, Interval, Parity, Record, Resources
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World, alone, on_rank_0, open_world, use_threads

__all__ = ["bench_rank"]

_MAX_UPDATES = 300  # of the untimed run
_TRIAL_UPDATES = 60
_SPLIT_UPDATES = 20


@dataclass
class _Arm:
    """One layout ready to run. On ranks that it does not use, `prepared` stays None."""

    layout: Layout
    parity: Parity
    world: World
    prepared: Prepared | None = None
    saved: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[float] = field(default_factory=list[float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    first_step_seconds: float | None = None
    inside: list[Inside] = field(default_factory=list[Inside])  # of each rank
    trial_seconds: list[float] = field(default_factory=list[float])
    # of each trial and rank: mean seconds of each phase of a step
    splits: list[list[list[float]]] = field(default_factory=list[list[list[float]]])
    resources: Resources | None = None

    @property
    def is_alone(self) -> bool:
        return self.layout.axis is None


@dataclass(frozen=True)
class _Bench:
    workload: Workload
    train_data: Any
    eval_data: Any
    run_updates: int
    lead_updates: int  # of a trial, before the clock starts
    trial_updates: int
    split_updates: int


def bench_rank(
    facts: RankFacts,
    what: Source | Workload,
    layouts: Sequence[Layout],
    launch: Launch,
    options: BenchOptions,
) -> list[Record] | None:
    """Check and time each layout; one Record for each on rank 0, None elsewhere."""
    for layout in layouts:
        layout.mesh(facts.size)
    with open_world(facts, launch) as world:
        startup_seconds = time.time() - options.started
        workload = load(what)
        workload = replace(workload, global_batch=workload.global_batch * options.batch_factor)
        train_data, eval_data = open_data(workload, world)
        bench = _planned(workload, train_data, eval_data, world, options)
        subject = subject_of(workload, train_data, eval_data, options.verify_steps)
        arms: list[_Arm] = []
        is_first = world.rank == 0
        with (
            progress(len(layouts) * (3 + options.trials), options.show and is_first) as begin,
            sampling(options.started, active=is_first) as sampler,
        ):
            for index, layout in enumerate(layouts):
                begin(f"check {layout}")
                sampler.now_running("check")
                parity, _ = check_layout(subject, layout, world, f"bench/{index}", options.by_name)
                arms.append(_Arm(layout, parity, alone(world) if layout.axis is None else world))
            running = [arm for arm in arms if arm.parity.status == "equal"]
            parts = [("look into", _look_inside), ("train", _train_once)]
            parts += [(f"time {trial + 1}", _time_once) for trial in range(options.trials)]
            for part, function in parts:
                for index, arm in enumerate(running):
                    begin(f"{part} {arm.layout}")
                    sampler.now_running(str(index))
                    _in_place(arm, world, f"bench/{part}/{index}", function, bench)
            sampler.now_running("end")
        if not is_first:
            return None
        source = provenance(workload, train_data, world, options.command)
        source["method"] = _method(bench, options)
        single = next((arm for arm in running if str(arm.layout) == "single"), None)
        for index, arm in enumerate(running):
            arm.resources = sampler.of(str(index))
        return [_record(arm, bench, facts, world, source, startup_seconds, single) for arm in arms]


def _planned(workload: Workload, train_data: Any, eval_data: Any, world: World, options: BenchOptions) -> _Bench:
    """How many updates each kind of run has."""
    planned = planned_updates(workload, len(train_data))
    # what loader workers read ahead before the clock starts has to be used up by then
    lead = min(2 * world.loader_workers * world.size, planned // 2)
    return _Bench(
        workload,
        train_data,
        eval_data,
        run_updates=min(planned, options.steps or _MAX_UPDATES),
        lead_updates=lead,
        trial_updates=min(planned - lead, options.steps or _TRIAL_UPDATES),
        split_updates=min(planned - lead, options.steps or _SPLIT_UPDATES),
    )


def _in_place(arm: _Arm, world: World, key: str, function: Any, bench: _Bench) -> None:
    """Run a part of the benchmark where the arm runs: on all ranks, or on rank 0 while the others wait."""
    if arm.is_alone:
        on_rank_0(world, key, lambda: function(arm, bench))
    else:
        use_threads(world.threads)
        dist.barrier(group=world.group)
        function(arm, bench)


def _look_inside(arm: _Arm, bench: _Bench) -> None:
    """Memory, traffic and exposed communication, as each rank sees them."""
    own = look_inside(bench.workload, bench.train_data, arm.layout, arm.world)
    row = torch.tensor([own.peak_memory_bytes, *own.idle, *own.exposed_shares], dtype=torch.float64)
    rows = [row.tolist() for row in gather(row, arm.world)]
    arm.inside = [
        replace(own, peak_memory_bytes=int(row[0]), idle=tuple(row[1:4]), exposed_shares=row[4:]) for row in rows
    ]


def _train_once(arm: _Arm, bench: _Bench) -> None:
    """Prepare the arm, keep its initial state, train: losses, metrics, and the warm-up."""
    arm.prepared = prepare(bench.workload, arm.layout, arm.world)
    arm.saved = snapshot(arm.prepared)
    start = now(arm.world.device)
    shares: list[Tensor] = []
    for share in _updates(arm, bench, bench.run_updates):
        shares.append(share)
        if arm.first_step_seconds is None:
            arm.first_step_seconds = now(arm.world.device) - start
    totals = torch.stack(shares).cpu() if arm.is_alone else sum_over_ranks(torch.stack(shares), arm.world)
    arm.losses = [total / count if count else math.nan for total, count in totals.tolist()]
    bad = next((step for step, value in enumerate(arm.losses) if not math.isfinite(value)), None)
    if bad is not None:  # on CUDA nobody has looked before
        raise NotFiniteError(f"layout {arm.layout}, update {bad}: the loss is {arm.losses[bad]}")
    if bench.eval_data is not None:
        arm.metrics = mean_metrics(
            bench.workload, evaluate(bench.workload, bench.eval_data, arm.layout, arm.world, arm.prepared)
        )


def _time_once(arm: _Arm, bench: _Bench) -> None:
    """One trial from the initial state; the slowest rank's time is the trial's. Then one that takes steps apart."""
    with _from_the_start(arm, bench, bench.trial_updates) as updates:
        start = now(arm.world.device)
        for _ in range(bench.trial_updates):  # not to the end of the generator, which ends its loader workers
            next(updates)
        seconds = now(arm.world.device) - start
    arm.trial_seconds.append(max(row[0] for row in _of_all_ranks([seconds], arm)))
    with _from_the_start(arm, bench, bench.split_updates) as updates:
        steps = phases(updates, arm.world.device)
    arm.splits.append(_of_all_ranks([fmean(step[phase] for step in steps) for phase in PHASES], arm))


@contextlib.contextmanager
def _from_the_start(arm: _Arm, bench: _Bench, count: int) -> Generator[Any]:
    """The updates of a trial: from the initial state, all ranks at once, no garbage collection."""
    assert arm.prepared is not None
    restore(arm.prepared, arm.saved)
    updates = _updates(arm, bench, bench.lead_updates + count)
    gc.collect()
    gc.disable()
    try:
        for _ in range(bench.lead_updates):
            next(updates)
        if not arm.is_alone:
            dist.barrier(group=arm.world.group)
        yield updates
    finally:
        gc.enable()


def _of_all_ranks(numbers: list[float], arm: _Arm) -> list[list[float]]:
    """A row of each rank that the arm uses."""
    return [row.tolist() for row in gather(torch.tensor(numbers, dtype=torch.float64), arm.world)]


def _updates(arm: _Arm, bench: _Bench, count: int) -> Any:
    assert arm.prepared is not None
    updates = all_updates(count, updates_per_epoch(*_sizes(bench)))
    return run_updates(bench.workload, bench.train_data, arm.layout, arm.world, arm.prepared, updates)


def _sizes(bench: _Bench) -> tuple[int, int]:
    """Samples of an epoch, and of an update."""
    return samples_per_epoch(bench.workload, len(bench.train_data)), bench.workload.global_batch


def _method(bench: _Bench, options: BenchOptions) -> str:
    return (
        f"{options.trials} interleaved trials of {bench.trial_updates} updates, each from the initial state, after one "
        f"untimed run of {bench.run_updates} updates"
        + (f" and the first {bench.lead_updates} of each trial" if bench.lead_updates else "")
        + "; medians with 95% bootstrap intervals; the slowest rank counts; "
        f"steps taken apart in {options.trials} runs of {bench.split_updates} updates of their own"
    )


def _record(
    arm: _Arm,
    bench: _Bench,
    facts: RankFacts,
    world: World,
    source: dict[str, Any],
    startup_seconds: float,
    single: _Arm | None,
) -> Record:
    sizes = _sizes(bench)
    samples = samples_before(bench.lead_updates + bench.trial_updates, *sizes) - samples_before(
        bench.lead_updates, *sizes
    )
    steps = [seconds / bench.trial_updates for seconds in arm.trial_seconds]
    is_timed = bool(arm.trial_seconds)
    throughput = interval([samples / seconds for seconds in arm.trial_seconds]) if is_timed else None
    return Record(
        workload=bench.workload.name,
        layout=str(arm.layout),
        launcher=facts.started_by,
        backend=world.backend if not arm.is_alone else "none",
        device=world.device.type,
        world_size=1 if arm.is_alone else world.size,
        parity=arm.parity,
        throughput_samples_per_second=throughput,
        ratio_to_single=_ratio(arm, single) if is_timed and single is not None else None,
        step_seconds=interval(steps) if is_timed else None,
        epoch_seconds=sizes[0] / throughput.median if throughput else None,
        breakdown_seconds=breakdown(arm.splits, [inside.exposed_shares for inside in arm.inside], steps),
        bubble=_bubble(arm.inside) if world.device.type == "cpu" else None,
        peak_memory_bytes=max((inside.peak_memory_bytes for inside in arm.inside), default=None),
        collectives=arm.inside[0].collectives if arm.inside else [],
        startup_seconds=startup_seconds if is_timed else None,
        first_step_seconds=arm.first_step_seconds,
        resources=arm.resources,
        loss=arm.losses,
        metrics=arm.metrics,
        provenance={**source, "threads_per_rank": arm.world.threads, "updates": bench.run_updates},
    )


def _bubble(inside: Sequence[Inside]) -> Bubble | None:
    """How long ranks stood idle beside how long they would by theory; None for a layout without a pipeline."""
    longest = max((own.idle[1] for own in inside), default=0.0)
    if not longest:
        return None
    return Bubble(inside[0].idle[0], fmean(own.idle[2] for own in inside) / longest)


def _ratio(arm: _Arm, single: _Arm) -> Interval:
    """How many times as fast, trial by trial: what slows the machine for a while slows both."""
    return interval([one / own for one, own in zip(single.trial_seconds, arm.trial_seconds, strict=True)])
