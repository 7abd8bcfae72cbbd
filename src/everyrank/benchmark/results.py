"""Results: the measurements of each layout so far, and the Records made from them at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from everyrank.benchmark.instrumented import Instrumented
from everyrank.data import Epoch, epoch_of
from everyrank.launch import RankInfo
from everyrank.layout import Layout
from everyrank.measure.clock import interval
from everyrank.measure.provenance import provenance
from everyrank.measure.resources import Sampler
from everyrank.measure.split import breakdown
from everyrank.options import BenchOptions
from everyrank.progress import print_row
from everyrank.record import Bubble, Interval, Parity, Record
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["Bench", "Candidate", "Results"]

_STOPPED = "the bench was stopped before it was checked"


@dataclass
class Candidate:
    """One layout with its measurements. On ranks that it does not use, `prepared` stays None."""

    layout: Layout
    parity: Parity
    world: World
    prepared: Prepared | None = None
    initial_state: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[float] = field(default_factory=list[float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    first_step_seconds: float | None = None
    instrumented: list[Instrumented] = field(default_factory=list[Instrumented])  # of each rank
    trial_seconds: list[float] = field(default_factory=list[float])
    # of each trial and rank: mean seconds of each phase of a step
    splits: list[list[list[float]]] = field(default_factory=list[list[list[float]]])

    @property
    def is_single_process(self) -> bool:
        """Whether the layout runs in one process while the other ranks wait."""
        return self.layout.axis is None


@dataclass(frozen=True)
class Bench:
    """The layouts to run, and the number of updates of each kind of run."""

    workload: Workload
    train_data: Any
    eval_data: Any
    run_updates: int
    warmup_updates: int  # of a trial, before the clock starts
    trial_updates: int
    split_updates: int

    @property
    def epoch(self) -> Epoch:
        """Return how an epoch is split into updates."""
        return epoch_of(self.workload, self.train_data)


@dataclass
class Results:
    """The results so far, which rank 0 prints and reports to the caller."""

    bench: Bench
    info: RankInfo
    world: World
    layouts: Sequence[Layout]
    options: BenchOptions
    sampler: Sampler
    startup_seconds: float
    candidates: list[Candidate] = field(default_factory=list[Candidate])

    def __post_init__(self) -> None:
        bench, options = self.bench, self.options
        self.source: dict[str, Any] = {"method": _method(bench, options), "trials_asked": options.trials}
        if self.world.rank == 0:  # the checksum may read all the data
            self.source |= provenance(bench.workload, bench.train_data, self.world, options.command)

    @property
    def running(self) -> list[Candidate]:
        """Return the candidates that were verified equal; these are timed."""
        return [candidate for candidate in self.candidates if candidate.parity.status == "equal"]

    def report(self, line: str) -> None:
        """Report the results so far, in case the bench is stopped, and print a line."""
        if self.world.rank != 0:
            return
        if self.info.keep is not None:
            self.sampler.update()
            self.info.keep(self.records())
        if line and self.options.show:
            print_row(line)

    def records(self) -> list[Record]:
        """Return a Record for each layout, also for those that have not run."""
        load = {"before": self.options.load_before, "others_cores": self.sampler.others_cores}
        running = self.running
        single = next(
            (candidate for candidate in running if str(candidate.layout) == "single" and candidate.trial_seconds), None
        )
        records: list[Record] = []
        for candidate in self.candidates:
            resources = self.sampler.of(str(running.index(candidate))) if candidate in running else None
            record = _record(candidate, self.bench, self.info, self.startup_seconds, single)
            records.append(
                replace(record, resources=resources, provenance={**self.source, "load": load, **record.provenance})
            )
        for layout in self.layouts[len(self.candidates) :]:
            candidate = Candidate(layout, Parity("not_verified", reason=_STOPPED), self.world)
            record = _record(candidate, self.bench, self.info, self.startup_seconds, None)
            records.append(replace(record, provenance={**self.source, "load": load}))
        return records


def _method(bench: Bench, options: BenchOptions) -> str:
    is_one_trial = options.trials == 1
    trials, runs = (
        ("1 trial", "a separate run")
        if is_one_trial
        else (f"{options.trials} interleaved trials", f"{options.trials} separate runs")
    )
    return (
        f"{trials} of {bench.trial_updates} updates, each from the initial state, after one "
        f"untimed run of {bench.run_updates} updates"
        + (f" and the first {bench.warmup_updates} of each trial" if bench.warmup_updates else "")
        + ("; one trial has no interval" if is_one_trial else "; medians with 95% bootstrap intervals")
        + f"; the slowest rank counts; step-time breakdown from {runs} of {bench.split_updates} updates"
    )


def _record(
    candidate: Candidate, bench: Bench, info: RankInfo, startup_seconds: float, single: Candidate | None
) -> Record:
    world = candidate.world
    epoch = bench.epoch
    samples = epoch.samples_before(bench.warmup_updates + bench.trial_updates) - epoch.samples_before(
        bench.warmup_updates
    )
    steps = [seconds / bench.trial_updates for seconds in candidate.trial_seconds]
    is_timed = bool(candidate.trial_seconds)
    throughput = interval([samples / seconds for seconds in candidate.trial_seconds]) if is_timed else None
    return Record(
        workload=bench.workload.name,
        layout=str(candidate.layout),
        launcher=info.started_by,
        backend=world.backend if not candidate.is_single_process else "none",
        device=world.device.type,
        world_size=1 if candidate.is_single_process else world.size,
        parity=candidate.parity,
        throughput_samples_per_second=throughput,
        ratio_to_single=_ratio(candidate, single) if is_timed and single is not None else None,
        step_seconds=interval(steps) if is_timed else None,
        epoch_seconds=epoch.samples / throughput.median if throughput else None,
        breakdown_seconds=breakdown(
            candidate.splits, [inside.exposed_fractions for inside in candidate.instrumented], steps
        ),
        bubble=_bubble(candidate.instrumented) if world.device.type == "cpu" else None,
        peak_memory_bytes=max((inside.peak_memory_bytes for inside in candidate.instrumented), default=None),
        collectives=candidate.instrumented[0].collectives if candidate.instrumented else [],
        startup_seconds=startup_seconds if is_timed else None,
        first_step_seconds=candidate.first_step_seconds,
        loss=candidate.losses,
        metrics=candidate.metrics,
        provenance={"threads_per_rank": world.threads, "updates": bench.run_updates},
    )


def _bubble(inside: Sequence[Instrumented]) -> Bubble | None:
    """Return the measured and the theoretical idle time of ranks; None for a layout without a pipeline."""
    longest = max((measurements.idle.seconds for measurements in inside), default=0.0)
    if not longest:
        return None
    return Bubble(
        inside[0].idle.theory_share, fmean(measurements.idle.waiting_seconds for measurements in inside) / longest
    )


def _ratio(candidate: Candidate, single: Candidate) -> Interval:
    """Return the speed relative to `single`, trial by trial, because a slow machine slows down both."""
    return interval(
        [
            single_seconds / candidate_seconds
            for single_seconds, candidate_seconds in zip(single.trial_seconds, candidate.trial_seconds, strict=False)
        ]
    )
