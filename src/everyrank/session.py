"""What a person's own process does: start the ranks, wait, hand back Records. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everyrank.errors import LayoutError, UsageError
from everyrank.launch import Launch, Named
from everyrank.launch import run as run_ranks
from everyrank.layout import Layout
from everyrank.options import BenchOptions, TrainOptions, VerifyOptions
from everyrank.record import Record
from everyrank.workload import Source, Workload, check_place

__all__ = ["bench", "run", "verify"]


def run(
    workload: Workload | Source,
    layout: Layout,
    launch: Launch,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    show: bool = True,
) -> list[Record]:
    """Train `workload` under `layout` on the ranks that `launch` starts; a list of one Record.

    `epochs` or `steps` replace the workload's own length; `out` is a folder for log.jsonl. Where this process is
    itself a rank that torchrun started, only rank 0 gets the Record, the others [].
    Raises an `EveryrankError`: `UsageError` for a wrong call or workload, `RankFailedError` when a rank fails.
    """
    _at_least_1(epochs=epochs, steps=steps)
    if epochs is not None and steps is not None:
        raise UsageError(f"--epochs {epochs} --steps {steps}: give one of the two")
    layout.mesh(launch.processes)
    if layout.axis is None and launch.processes > 1:
        raise LayoutError(f"layout {layout} runs in one process, not in {launch.processes}; use --processes 1")
    options = TrainOptions(_command(), time.time(), epochs, steps, out, show)
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
    show: bool = True,
) -> list[Record]:
    """Check each layout as `verify` does and time those that are equal; one Record for each.

    `steps` is the number of updates of a trial and of the untimed run before. Raises what `run` raises.
    """
    _at_least_1(trials=trials, steps=steps)
    for layout in layouts:
        layout.mesh(launch.processes)
    options = BenchOptions(_command(), time.time(), trials, steps, show=show)
    results = run_ranks(launch, Named("everyrank.bench:bench_rank"), _sent(workload), list(layouts), launch, options)
    return results.get(0) or []


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
