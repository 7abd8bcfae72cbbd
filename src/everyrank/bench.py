"""Bench: the layouts side by side. Only what was checked equal gets a number.

1. Each layout is compared with `single` (parity.py).
2. Each arm trains once from its initial state: its losses, its metrics, and the warm-up. This run is not timed.
3. The arms take turns, A B C A B C ...; before each trial the initial state is put back, outside the timed region.

Inside the timed region is the loop and nothing else: no reading of the loss, no barrier, no metric, no print.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.collectives import gather, sum_over_ranks
from everyrank.data import all_updates, samples_before, updates_per_epoch
from everyrank.launch import Launch, RankFacts
from everyrank.layout import Layout
from everyrank.loop import evaluate, mean_metrics, open_data, planned_updates, restore, run_updates, snapshot
from everyrank.measure.clock import interval, now
from everyrank.measure.provenance import provenance
from everyrank.options import BenchOptions
from everyrank.parity import check_layout, subject_of
from everyrank.progress import progress
from everyrank.record import Parity, Record
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World, alone, on_rank_0, open_world, use_threads

__all__ = ["bench_rank"]

_MAX_UPDATES = 300  # of the untimed run
_TRIAL_UPDATES = 60


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
    peak_memory_bytes: int | None = None
    trial_seconds: list[float] = field(default_factory=list[float])

    @property
    def is_alone(self) -> bool:
        return self.layout.axis is None


@dataclass(frozen=True)
class _Bench:
    workload: Workload
    train_data: Any
    eval_data: Any
    run_updates: int
    trial_updates: int


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
        train_data, eval_data = open_data(workload, world.size)
        planned = planned_updates(workload, len(train_data))
        bench = _Bench(
            workload,
            train_data,
            eval_data,
            run_updates=min(planned, options.steps or _MAX_UPDATES),
            trial_updates=min(planned, options.steps or _TRIAL_UPDATES),
        )
        subject = subject_of(workload, train_data, eval_data, options.verify_steps)
        arms: list[_Arm] = []
        with progress(len(layouts) * (2 + options.trials), options.show and world.rank == 0) as begin:
            for index, layout in enumerate(layouts):
                begin(f"check {layout}")
                parity, _ = check_layout(subject, layout, world, f"bench/{index}")
                arms.append(_Arm(layout, parity, alone(world) if layout.axis is None else world))
            running = [arm for arm in arms if arm.parity.status == "equal"]
            for index, arm in enumerate(running):
                begin(f"train {arm.layout}")
                _in_place(arm, world, f"bench/train/{index}", _train_once, bench)
            for trial in range(options.trials):
                for index, arm in enumerate(running):
                    begin(f"time {arm.layout} ({trial + 1} of {options.trials})")
                    _in_place(arm, world, f"bench/trial/{trial}/{index}", _time_once, bench)
        if world.rank != 0:
            return None
        source = provenance(workload, train_data, world, options.command)
        source["method"] = _method(bench, options)
        return [_record(arm, bench, facts, world, source, startup_seconds) for arm in arms]


def _in_place(arm: _Arm, world: World, key: str, function: Any, bench: _Bench) -> None:
    """Run a part of the benchmark where the arm runs: on all ranks, or on rank 0 while the others wait."""
    if arm.is_alone:
        on_rank_0(world, key, lambda: function(arm, bench))
    else:
        use_threads(world.threads)
        dist.barrier(group=world.group)
        function(arm, bench)


def _train_once(arm: _Arm, bench: _Bench) -> None:
    """Prepare the arm, keep its initial state, train: losses, metrics, and the warm-up."""
    is_cuda = arm.world.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(arm.world.device)
    others_bytes = torch.cuda.memory_allocated(arm.world.device) if is_cuda else 0
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
    if bench.eval_data is not None:
        arm.metrics = mean_metrics(evaluate(bench.workload, bench.eval_data, arm.layout, arm.world, arm.prepared))
    if is_cuda:
        arm.peak_memory_bytes = torch.cuda.max_memory_allocated(arm.world.device) - others_bytes


def _time_once(arm: _Arm, bench: _Bench) -> None:
    """One trial from the initial state; the slowest rank's time is the trial's."""
    assert arm.prepared is not None
    restore(arm.prepared, arm.saved)
    updates = _updates(arm, bench, bench.trial_updates)
    gc.collect()
    gc.disable()
    try:
        if not arm.is_alone:
            dist.barrier(group=arm.world.group)
        start = now(arm.world.device)
        for _ in updates:
            pass
        seconds = now(arm.world.device) - start
    finally:
        gc.enable()
    if not arm.is_alone:
        seconds = max(float(row) for row in gather(torch.tensor([seconds], dtype=torch.float64), arm.world))
    arm.trial_seconds.append(seconds)


def _updates(arm: _Arm, bench: _Bench, count: int) -> Any:
    assert arm.prepared is not None
    updates = all_updates(count, updates_per_epoch(len(bench.train_data), bench.workload.global_batch))
    return run_updates(bench.workload, bench.train_data, arm.layout, arm.world, arm.prepared, updates)


def _method(bench: _Bench, options: BenchOptions) -> str:
    return (
        f"{options.trials} interleaved trials of {bench.trial_updates} updates, each from the initial state, after one "
        f"untimed run of {bench.run_updates} updates; medians with 95% bootstrap intervals; the slowest rank counts"
    )


def _record(
    arm: _Arm, bench: _Bench, facts: RankFacts, world: World, source: dict[str, Any], startup_seconds: float
) -> Record:
    samples = samples_before(bench.trial_updates, len(bench.train_data), bench.workload.global_batch)
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
        step_seconds=interval([s / bench.trial_updates for s in arm.trial_seconds]) if is_timed else None,
        epoch_seconds=len(bench.train_data) / throughput.median if throughput else None,
        peak_memory_bytes=arm.peak_memory_bytes,
        startup_seconds=startup_seconds if is_timed else None,
        first_step_seconds=arm.first_step_seconds,
        loss=arm.losses,
        metrics=arm.metrics,
        provenance={**source, "threads_per_rank": arm.world.threads, "updates": bench.run_updates},
    )
