"""What a person's own process does: start the ranks, wait, hand back Records. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everyrank.errors import EveryrankError, LayoutError, UsageError
from everyrank.launch import Launch, Named
from everyrank.launch import run as run_ranks
from everyrank.layout import Layout
from everyrank.options import BenchOptions, TrainOptions, VerifyOptions
from everyrank.record import Interval, Parity, Record, Scaling
from everyrank.workload import Source, Workload, check_place

__all__ = ["bench", "bench_scaling", "run", "verify"]


def run(
    workload: Workload | Source,
    layout: Layout,
    launch: Launch,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    profile: Path | None = None,
    show: bool = True,
) -> list[Record]:
    """Train `workload` under `layout` on the ranks that `launch` starts; a list of one Record.

    `epochs` or `steps` replace the workload's own length; `out` is a folder for log.jsonl; `profile` a file for the
    trace of one step of all ranks, JSON for Perfetto or Chrome (a name that ends in .gz is compressed).
    Where this process is itself a rank that torchrun started, only rank 0 gets the Record, the others [].
    Raises an `EveryrankError`: `UsageError` for a wrong call or workload, `RankFailedError` when a rank fails.
    """
    _at_least_1(epochs=epochs, steps=steps)
    if epochs is not None and steps is not None:
        raise UsageError(f"--epochs {epochs} --steps {steps}: give one of the two")
    layout.mesh(launch.processes)
    if layout.axis is None and launch.processes > 1:
        raise LayoutError(f"layout {layout} runs in one process, not in {launch.processes}; use --processes 1")
    options = TrainOptions(_command(), time.time(), epochs, steps, out, profile, show)
    results = run_ranks(launch, Named("everyrank.train:train_rank"), _sent(workload), layout, launch, options)
    record = results.get(0)
    return [record] if record is not None else []


def verify(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    *,
    steps: int = 20,
    samples: bool = False,
    show: bool = True,
) -> list[Record]:
    """Compare each layout with one device over `steps` updates; one Record for each.

    `samples` also audits that each sample is read once in every epoch and counted once in evaluation.
    A difference is no error: it is in `Record.parity`. Raises what `run` raises.
    """
    _at_least_1(steps=steps)
    for layout in layouts:
        layout.mesh(launch.processes)
    options = VerifyOptions(_command(), steps, samples, show)
    results = run_ranks(launch, Named("everyrank.verify:verify_rank"), _sent(workload), list(layouts), launch, options)
    return results.get(0) or []


def bench(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    *,
    trials: int = 5,
    steps: int | None = None,
    batch_factor: int = 1,
    show: bool = True,
) -> list[Record]:
    """Check each layout as `verify` does and time those that are equal; one Record for each.

    `steps` is the number of updates of a trial and of the untimed run before; `batch_factor` multiplies the global
    batch. Raises what `run` raises.
    """
    _at_least_1(trials=trials, steps=steps)
    for layout in layouts:
        layout.mesh(launch.processes)
    options = BenchOptions(_command(), time.time(), trials, steps, batch_factor=batch_factor, show=show)
    results = run_ranks(launch, Named("everyrank.bench:bench_rank"), _sent(workload), list(layouts), launch, options)
    return results.get(0) or []


def bench_scaling(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    processes: Sequence[int],
    *,
    trials: int = 5,
    steps: int | None = None,
    show: bool = True,
) -> list[Record]:
    """`bench` on each number of ranks, which begin with 1; two Records for each layout on more than one.

    Strong scaling keeps the global batch; weak scaling keeps the batch of each rank, so that the global batch grows.
    The efficiency in `Record.scaling` is the throughput divided by the ranks and by that of the same layout on one
    rank. Each number of ranks is a launch of its own: their trials are not interleaved.
    """
    sizes = list(dict.fromkeys(processes))
    if sizes[0] != 1 or sorted(sizes) != sizes:
        given = " ".join(map(str, processes))
        raise UsageError(f"--processes {given}: scaling is measured against one rank; give 1 first and then more")
    records: list[Record] = []
    base: dict[str, Record] = {}
    distributed = [layout for layout in layouts if layout.axis is not None]
    for size in sizes:
        here = dataclasses.replace(launch, processes=size)
        for kind, factor in (("strong", 1), ("weak", size)):
            if size == 1 and kind == "weak":
                continue
            shown = layouts if size == 1 else distributed
            if not shown:
                continue
            try:
                made = bench(workload, shown, here, trials=trials, steps=steps, batch_factor=factor, show=show)
            except EveryrankError as error:
                if not records:
                    raise
                # what smaller sizes came to is not thrown away
                made = [_not_verified(records[0], layout, size, str(error)) for layout in shown]
            base = base or {record.layout: record for record in made}
            records += [_with_efficiency(record, base[record.layout], kind) for record in made]
    return records


def _not_verified(like: Record, layout: Layout, size: int, reason: str) -> Record:
    parity = Parity("not_verified", reason=reason)
    where = (like.launcher, like.backend, like.device, size)
    return Record(like.workload, str(layout), *where, parity=parity, provenance=like.provenance)


def _with_efficiency(record: Record, base: Record, kind: str) -> Record:
    """The Record with its efficiency; the interval is the widest that both intervals allow."""
    own, one = record.throughput_samples_per_second, base.throughput_samples_per_second
    if record is base or own is None or one is None:
        return record
    size = record.world_size
    efficiency = Interval(
        own.median / one.median / size,
        own.low / one.high / size,
        own.high / one.low / size,
        min(own.trials, one.trials),
    )
    return dataclasses.replace(record, scaling=Scaling(kind, efficiency))


def _sent(workload: Workload | Source) -> Workload | Source:
    """What travels to the ranks: the source where there is one, because lambdas do not pickle; else the object."""
    sent = workload.source or workload if isinstance(workload, Workload) else workload
    if isinstance(sent, Source):
        check_place(sent.place)
    return sent


def _command() -> list[str]:
    """What was typed, without where this machine keeps the program."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return ["everyrank" if name in ("everyrank", "__main__.py") else name, *sys.argv[1:]]


def _at_least_1(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(f"--{name} {number}: give at least 1")
