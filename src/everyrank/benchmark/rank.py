"""Rank's part of `everyrank bench`: verifies each layout, then times the equal ones in turns.

1. Each layout is compared with `single` (parity/).
2. Each is profiled once: peak memory, communication volume, exposed communication (instrumented.py).
3. Each candidate trains once from its initial state: its losses, its metrics, and the warm-up. This run is not timed.
4. The candidates take turns, A B C A B C ... The initial state is restored before each trial, outside the timed region.
   After each trial the same candidate runs a shorter one for the phase breakdown (measure/split.py).

After each part, rank 0 prints a line and hands the results to the caller, so that a bench can be stopped at any time.

The timed region holds only the loop. It reads no loss and has no barrier, metric or print.

All candidates exist at the same time. Between its turns a candidate keeps parameters and optimizer state on its device,
its initial state in host memory, and no gradients.
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
from everyrank.benchmark.results import Bench, Candidate, Results
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
from everyrank.progress import print_lines_once, progress
from everyrank.record import Record
from everyrank.strategies import prepare
from everyrank.workload import Source, Workload, changed, load
from everyrank.world import World, on_rank_0, open_world, single_process_world, use_threads
from everyrank.world.collectives import all_gather, sum_over_ranks
from everyrank.world.world import gpus_of_host

__all__ = ["bench_rank"]

_MAX_UPDATES = 300  # of the untimed run
_TRIAL_UPDATES = 60
_SPLIT_UPDATES = 20


def bench_rank(
    info: RankInfo,
    workload_or_source: Source | Workload,
    layouts: Sequence[Layout],
    launch: Launch,
    options: BenchOptions,
) -> list[Record] | None:
    """Verify and time each layout. Returns one Record for each on rank 0, None on the other ranks."""
    for layout in layouts if options.explicit else ():  # other layouts are skipped with a reason
        layout.mesh(info.size)
    is_first = info.rank == 0
    with (
        open_world(info, launch) as world,
        progress(len(layouts) * (3 + options.trials), options.show and is_first) as advance,
        print_lines_once(is_first),
    ):
        startup_seconds = time.time() - options.started
        monotonic_start = time.monotonic() - startup_seconds
        workload = load(workload_or_source)
        workload = changed(workload, global_batch=workload.global_batch * options.batch_factor)
        train_data, eval_data = open_data(workload, world)
        bench = _plan_bench(workload, train_data, eval_data, world, options)
        case = parity_case(workload, train_data, eval_data, options.verify_steps, is_cached=True)
        with sampling(monotonic_start, is_first, gpus_of_host(world)) as sampler:
            results = Results(bench, info, world, layouts, options, sampler, startup_seconds)
            for index, layout in enumerate(layouts):
                advance(f"check {layout}")
                sampler.now_running("check")
                parity, _ = check_layout(case, layout, world, f"bench/{index}", options.explicit)
                results.candidates.append(
                    Candidate(layout, parity, single_process_world(world) if layout.axis is None else world)
                )
                results.report(f"{layout}: {parity.outcome}")
            _measure(results, world, advance)
            sampler.now_running("end")
        return results.records() if is_first else None


def _measure(results: Results, world: World, advance: Callable[[str], None]) -> None:
    """Run each part of the benchmark for all candidates that are equal, in turns."""
    bench, options, running = results.bench, results.options, results.running
    stages = [("profile", _profile), ("train", _train_once)]
    stages += [(f"time {trial + 1}", _time_once) for trial in range(options.trials)]
    for label, function in stages:
        for index, candidate in enumerate(running):
            advance(f"{label} {candidate.layout}")
            results.sampler.now_running(str(index))
            _run_on_its_ranks(candidate, world, f"bench/{label}/{index}", function, bench)
            if candidate.prepared is not None:
                candidate.prepared.trainable.forget_gradients()
            results.report(_trial_line(candidate, bench, options) if function is _time_once else "")


def _trial_line(candidate: Candidate, bench: Bench, options: BenchOptions) -> str:
    """Return the results of a candidate so far, on rank 0."""
    if not candidate.trial_seconds:
        return ""
    step_ms = candidate.trial_seconds[-1] / bench.trial_updates * 1e3
    return f"{candidate.layout}: trial {len(candidate.trial_seconds)} of {options.trials}, {step_ms:.2f} ms a step"


def _plan_bench(workload: Workload, train_data: Any, eval_data: Any, world: World, options: BenchOptions) -> Bench:
    """Return the data of the benchmark, and the number of updates of each kind of run."""
    planned = planned_updates(workload, train_data)
    # enough to use up the batches that loader workers read before the clock starts
    warmup = min(2 * world.loader_workers * world.size, planned // 2)
    return Bench(
        workload,
        train_data,
        eval_data,
        run_updates=min(planned, options.steps or _MAX_UPDATES),
        warmup_updates=warmup,
        trial_updates=min(planned - warmup, options.steps or _TRIAL_UPDATES),
        split_updates=min(planned - warmup, options.steps or _SPLIT_UPDATES),
    )


def _run_on_its_ranks(candidate: Candidate, world: World, key: str, function: Any, bench: Bench) -> None:
    """Run a part of the benchmark where the candidate runs: on all ranks, or on rank 0 while the others wait."""
    if candidate.is_single_process:
        on_rank_0(world, key, lambda: function(candidate, bench))
    else:
        use_threads(world.threads)
        dist.barrier(group=world.group)
        function(candidate, bench)


def _profile(candidate: Candidate, bench: Bench) -> None:
    """Measure peak memory, communication volume and exposed communication on each rank."""
    local = run_instrumented(bench.workload, bench.train_data, candidate.layout, candidate.world)
    row = torch.tensor([local.peak_memory_bytes, *local.idle, *local.exposed_fractions], dtype=torch.float64)
    rows = [row.tolist() for row in all_gather(row, candidate.world)]
    candidate.instrumented = [
        replace(local, peak_memory_bytes=int(row[0]), idle=PipelineIdle(*row[1:4]), exposed_fractions=row[4:])
        for row in rows
    ]


def _train_once(candidate: Candidate, bench: Bench) -> None:
    """Prepare the candidate, keep its initial state, train: losses, metrics, and the warm-up."""
    candidate.prepared = prepare(bench.workload, candidate.layout, candidate.world)
    candidate.initial_state = _on_host(candidate.prepared.trainable.snapshot())
    start = now(candidate.world.device)
    shares: list[Tensor] = []
    for share in _updates(candidate, bench, bench.run_updates):
        shares.append(share)
        if candidate.first_step_seconds is None:
            candidate.first_step_seconds = now(candidate.world.device) - start
    totals = (
        torch.stack(shares).cpu()
        if candidate.is_single_process
        else sum_over_ranks(torch.stack(shares), candidate.world)
    )
    candidate.losses = [total / count if count else math.nan for total, count in totals.tolist()]
    first_bad = next((step for step, value in enumerate(candidate.losses) if not math.isfinite(value)), None)
    if first_bad is not None:  # on CUDA the loss has not been read before
        raise NotFiniteError(
            f"layout {candidate.layout}, update {first_bad}: the loss is {candidate.losses[first_bad]}"
        )
    if bench.eval_data is not None:
        candidate.metrics = mean_metrics(bench.workload, evaluate(candidate.prepared, bench.eval_data))


def _on_host(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot with its tensors in host memory, because other candidates need the device's memory."""
    return {**snapshot, **{name: [tensor.cpu() for tensor in snapshot[name]] for name in ("tensors", "ema")}}


def _time_once(candidate: Candidate, bench: Bench) -> None:
    """Time one trial from the initial state, on the slowest rank. Then measure the phase breakdown in a shorter one."""
    with _restarted(candidate, bench, bench.trial_updates) as updates:
        start = now(candidate.world.device)
        for _ in range(bench.trial_updates):  # the generator is not exhausted, which would stop its loader workers
            next(updates)
        seconds = now(candidate.world.device) - start
    assert candidate.prepared is not None
    candidate.trial_seconds.append(max(row[0] for row in _of_all_ranks([seconds], candidate)))
    with _restarted(candidate, bench, bench.split_updates) as updates:
        steps = phases(candidate.prepared.trainable, updates, candidate.world.device)
    candidate.splits.append(_of_all_ranks([fmean(step[phase] for step in steps) for phase in PHASES], candidate))


@contextlib.contextmanager
def _restarted(candidate: Candidate, bench: Bench, count: int) -> Generator[Any]:
    """Restore the initial state, warm up, and yield the updates of a trial, with garbage collection off."""
    assert candidate.prepared is not None
    candidate.prepared.trainable.restore(candidate.initial_state)
    updates = _updates(candidate, bench, bench.warmup_updates + count)
    gc.collect()
    gc.disable()
    try:
        for _ in range(bench.warmup_updates):
            next(updates)
        if not candidate.is_single_process:
            dist.barrier(group=candidate.world.group)
        yield updates
    finally:
        gc.enable()


def _of_all_ranks(numbers: list[float], candidate: Candidate) -> list[list[float]]:
    """Return a row of each rank that the candidate uses."""
    return [row.tolist() for row in all_gather(torch.tensor(numbers, dtype=torch.float64), candidate.world)]


def _updates(candidate: Candidate, bench: Bench, count: int) -> Any:
    assert candidate.prepared is not None
    updates = all_updates(count, bench.epoch.updates)
    return run_updates(candidate.prepared, bench.train_data, updates)
