"""The layouts timed in turns, side by side; only what was checked equal gets a number.

1. Each layout is compared with `single` (parity.py).
2. Each is looked into under instruments: peak memory, what travels, exposed communication (instrumented.py).
3. Each arm trains once from its initial state: its losses, its metrics, and the warm-up. This run is not timed.
4. The arms take turns, A B C A B C ...; before each trial the initial state is put back, outside the timed region.
   After each trial the same arm runs a shorter one that takes its steps apart (measure/split.py).

After each of these what is known is said, and left with whoever started the ranks: a bench may be stopped.

Inside the timed region is the loop and nothing else: no reading of the loss, no barrier, no metric, no print.

All arms are there at a time. Between its turns an arm keeps parameters and optimizer state on its device; its initial
state lies in the host's memory, and it has no gradients.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.benchmark.instrumented import run_instrumented
from everyrank.benchmark.results import Arm, Bench, Results
from everyrank.data import all_updates, planned_updates
from everyrank.errors import NotFiniteError
from everyrank.launch import Launch, RankInfo
from everyrank.layout import Layout
from everyrank.loop import evaluate, mean_metrics, open_data, run_updates
from everyrank.measure.clock import now
from everyrank.measure.resources import sampling
from everyrank.measure.split import PHASES, phases
from everyrank.options import BenchOptions
from everyrank.parallel.pipeline.run import PipelineIdle
from everyrank.parity import check_layout, parity_case
from everyrank.progress import progress, said_once
from everyrank.record import Record
from everyrank.strategies import prepare
from everyrank.workload import Source, Workload, changed, load
from everyrank.world import World, on_rank_0, open_world, single_process_world, use_threads
from everyrank.world.collectives import all_gather, sum_over_ranks
from everyrank.world.world import cards_here

__all__ = ["bench_rank"]

_MAX_UPDATES = 300  # of the untimed run
_TRIAL_UPDATES = 60
_SPLIT_UPDATES = 20


def bench_rank(
    info: RankInfo,
    what: Source | Workload,
    layouts: Sequence[Layout],
    launch: Launch,
    options: BenchOptions,
) -> list[Record] | None:
    """Check and time each layout; one Record for each on rank 0, None elsewhere."""
    for layout in layouts if options.by_name else ():  # what nobody asked for is left out, and says why
        layout.mesh(info.size)
    is_first = info.rank == 0
    with (
        open_world(info, launch) as world,
        progress(len(layouts) * (3 + options.trials), options.show and is_first) as begin,
        said_once(is_first),
    ):
        startup_seconds = time.time() - options.started
        begun = time.monotonic() - startup_seconds
        workload = load(what)
        workload = changed(workload, global_batch=workload.global_batch * options.batch_factor)
        train_data, eval_data = open_data(workload, world)
        bench = _planned(workload, train_data, eval_data, world, options)
        case = parity_case(workload, train_data, eval_data, options.verify_steps, is_cached=True)
        with sampling(begun, is_first, cards_here(world)) as sampler:
            results = Results(bench, info, world, layouts, options, sampler, startup_seconds)
            for index, layout in enumerate(layouts):
                begin(f"check {layout}")
                sampler.now_running("check")
                parity, _ = check_layout(case, layout, world, f"bench/{index}", options.by_name)
                results.arms.append(Arm(layout, parity, single_process_world(world) if layout.axis is None else world))
                results.told(f"{layout}: {parity.outcome}")
            _measure(results, world, begin)
            sampler.now_running("end")
        return results.records() if is_first else None


def _measure(results: Results, world: World, begin: Callable[[str], None]) -> None:
    """Run each part of the benchmark for all arms that are equal, in turns."""
    bench, options, running = results.bench, results.options, results.running
    parts = [("look into", _look_inside), ("train", _train_once)]
    parts += [(f"time {trial + 1}", _time_once) for trial in range(options.trials)]
    for part, function in parts:
        for index, arm in enumerate(running):
            begin(f"{part} {arm.layout}")
            results.sampler.now_running(str(index))
            _in_place(arm, world, f"bench/{part}/{index}", function, bench)
            if arm.prepared is not None:
                arm.prepared.trainable.forget_gradients()
            results.told(_line(arm, bench, options) if function is _time_once else "")


def _line(arm: Arm, bench: Bench, options: BenchOptions) -> str:
    """What is known of an arm after a trial, on rank 0."""
    if not arm.trial_seconds:
        return ""
    step_ms = arm.trial_seconds[-1] / bench.trial_updates * 1e3
    return f"{arm.layout}: trial {len(arm.trial_seconds)} of {options.trials}, {step_ms:.2f} ms a step"


def _planned(workload: Workload, train_data: Any, eval_data: Any, world: World, options: BenchOptions) -> Bench:
    """How many updates each kind of run has."""
    planned = planned_updates(workload, train_data)
    # what loader workers read ahead before the clock starts has to be used up by then
    lead = min(2 * world.loader_workers * world.size, planned // 2)
    return Bench(
        workload,
        train_data,
        eval_data,
        run_updates=min(planned, options.steps or _MAX_UPDATES),
        lead_updates=lead,
        trial_updates=min(planned - lead, options.steps or _TRIAL_UPDATES),
        split_updates=min(planned - lead, options.steps or _SPLIT_UPDATES),
    )


def _in_place(arm: Arm, world: World, key: str, function: Any, bench: Bench) -> None:
    """Run a part of the benchmark where the arm runs: on all ranks, or on rank 0 while the others wait."""
    if arm.is_alone:
        on_rank_0(world, key, lambda: function(arm, bench))
    else:
        use_threads(world.threads)
        dist.barrier(group=world.group)
        function(arm, bench)


def _look_inside(arm: Arm, bench: Bench) -> None:
    """Memory, traffic and exposed communication, as each rank sees them."""
    own = run_instrumented(bench.workload, bench.train_data, arm.layout, arm.world)
    row = torch.tensor([own.peak_memory_bytes, *own.idle, *own.exposed_shares], dtype=torch.float64)
    rows = [row.tolist() for row in all_gather(row, arm.world)]
    arm.inside = [
        replace(own, peak_memory_bytes=int(row[0]), idle=PipelineIdle(*row[1:4]), exposed_shares=row[4:])
        for row in rows
    ]


def _train_once(arm: Arm, bench: Bench) -> None:
    """Prepare the arm, keep its initial state, train: losses, metrics, and the warm-up."""
    arm.prepared = prepare(bench.workload, arm.layout, arm.world)
    arm.saved = _on_host(arm.prepared.trainable.snapshot())
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
        arm.metrics = mean_metrics(bench.workload, evaluate(arm.prepared, bench.eval_data))


def _on_host(saved: dict[str, Any]) -> dict[str, Any]:
    """A snapshot whose tensors of the model lie in the host's memory: other arms need the device's."""
    return {**saved, **{name: [tensor.cpu() for tensor in saved[name]] for name in ("tensors", "ema")}}


def _time_once(arm: Arm, bench: Bench) -> None:
    """One trial from the initial state; the slowest rank's time is the trial's. Then one that takes steps apart."""
    with _from_the_start(arm, bench, bench.trial_updates) as updates:
        start = now(arm.world.device)
        for _ in range(bench.trial_updates):  # not to the end of the generator, which ends its loader workers
            next(updates)
        seconds = now(arm.world.device) - start
    assert arm.prepared is not None
    arm.trial_seconds.append(max(row[0] for row in _of_all_ranks([seconds], arm)))
    with _from_the_start(arm, bench, bench.split_updates) as updates:
        steps = phases(arm.prepared.trainable, updates, arm.world.device)
    arm.splits.append(_of_all_ranks([fmean(step[phase] for step in steps) for phase in PHASES], arm))


@contextlib.contextmanager
def _from_the_start(arm: Arm, bench: Bench, count: int) -> Generator[Any]:
    """The updates of a trial: from the initial state, all ranks at once, no garbage collection."""
    assert arm.prepared is not None
    arm.prepared.trainable.restore(arm.saved)
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


def _of_all_ranks(numbers: list[float], arm: Arm) -> list[list[float]]:
    """A row of each rank that the arm uses."""
    return [row.tolist() for row in all_gather(torch.tensor(numbers, dtype=torch.float64), arm.world)]


def _updates(arm: Arm, bench: Bench, count: int) -> Any:
    assert arm.prepared is not None
    updates = all_updates(count, bench.epoch.updates)
    return run_updates(arm.prepared, bench.train_data, updates)
