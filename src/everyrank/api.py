"""What a person's own process does: start the ranks, wait, hand back Records. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everyrank.errors import EveryrankError, LayoutError, StoppedError, UnsupportedLayoutError, UsageError
from everyrank.launch import Launch, Named, listen
from everyrank.launch import run as run_ranks
from everyrank.layout import Layout
from everyrank.options import BenchOptions, PredictOptions, TrainOptions, VerifyOptions
from everyrank.progress import row_known
from everyrank.record import Interval, Parity, Record, Scaling
from everyrank.runs import find_checkpoint, require_whole
from everyrank.tasks.predictions import check_predictions_suffix
from everyrank.workload import Source, Workload, check_place

__all__ = ["bench", "bench_scaling", "predict", "run", "verify"]


def run(
    workload: Workload | Source,
    layout: Layout,
    launch: Launch,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    profile: Path | None = None,
    resume: Path | None = None,
    pretrained: Path | None = None,
    evaluate: bool = False,
    evaluate_every: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    best_by: str | None = None,
    save_async: bool = False,
    trackers: Sequence[str] = (),
    show: bool = True,
) -> list[Record]:
    """Train `workload` under `layout` on the ranks that `launch` starts; a list of one Record.

    epochs, steps    replace the workload's own length
    out              the folder of the run: its log and its checkpoints; None: nothing is written
    profile          a file for the trace of one step of all ranks, JSON for Perfetto or Chrome (.gz: compressed)
    resume           a run (its newest checkpoint) or a checkpoint to go on from, saved under any layout
    pretrained       a file of weights to begin from: safetensors, or a state dict
    evaluate         evaluate what `resume` or `pretrained` gives, and do not train
    evaluate_every   updates between two evaluations (default: an epoch; 0: at the end alone)
    save_every       updates between two checkpoints (default: an epoch; 0: none)
    keep, best_by    how many of the last checkpoints stay, beside the best by this metric
    save_async       write checkpoints while the training goes on
    trackers         tensorboard, wandb

    Where this process is itself a rank that torchrun started, only rank 0 gets the Record, the others [].
    Raises an `EveryrankError`: `UsageError` for a wrong call or workload, `RankFailedError` when a rank fails,
    `StoppedError` when SIGTERM or SIGUSR1 asked to stop: then the update in progress is done and saved.
    """
    _at_least_1(epochs=epochs, steps=steps, keep=keep)
    for flag, number in (("evaluate-every", evaluate_every), ("save-every", save_every)):
        if number is not None and number < 0:
            raise UsageError(f"--{flag} {number}: give a number of updates, or 0")
    if epochs is not None and steps is not None:
        raise UsageError(f"--epochs {epochs} --steps {steps}: give one of the two")
    _check_one_process(layout, launch)
    options = TrainOptions(
        _command(),
        time.time(),
        epochs,
        steps,
        out.absolute() if out is not None else None,
        profile,
        _checkpoint(resume),
        pretrained.absolute() if pretrained is not None else None,
        evaluate,
        evaluate_every,
        save_every,
        keep,
        best_by,
        save_async,
        tuple(trackers),
        show,
    )
    with listen(signal.SIGTERM, signal.SIGUSR1) as stop:
        try:
            results = run_ranks(
                launch, Named("everyrank.tasks.train:train_rank"), _sent(workload), layout, launch, options, stop=stop
            )
        except StoppedError as error:
            if stop.asked is not None:
                error.exit_status = 128 + stop.asked
            raise
    record = results.get(0)
    return [record] if record is not None else []


def predict(
    workload: Workload | Source,
    layout: Layout,
    launch: Launch,
    *,
    out: Path,
    resume: Path | None = None,
    pretrained: Path | None = None,
    training_data: bool = False,
    show: bool = True,
) -> int:
    """Write the model's predictions for the held-out data to `out`, in the order of the data; how many there are.

    The end of the name says how: .jsonl (a row for each sample) or .npy (one array). `training_data` takes that
    instead. Raises what `run` raises.
    """
    check_predictions_suffix(out)
    if resume is None and pretrained is None:
        raise UsageError("predict needs what was trained: --resume DIR (a run or a checkpoint), or --pretrained FILE")
    if resume is not None and pretrained is not None:
        raise UsageError("--resume and --pretrained: a checkpoint has weights of its own; give one of the two")
    _check_one_process(layout, launch)
    weights = pretrained.absolute() if pretrained is not None else None
    options = PredictOptions(_command(), out.absolute(), _checkpoint(resume), weights, training_data, show)
    results = run_ranks(launch, Named("everyrank.tasks.predict:predict_rank"), _sent(workload), layout, launch, options)
    return results.get(0) or 0


def _check_one_process(layout: Layout, launch: Launch) -> None:
    layout.mesh(launch.processes)
    if layout.axis is None and launch.processes > 1:
        raise LayoutError(f"layout {layout} runs in one process, not in {launch.processes}; use --processes 1")


def _checkpoint(place: Path | None) -> Path | None:
    """The folder of the checkpoint that a run, or the checkpoint itself, stands for; its files have their sizes."""
    if place is None:
        return None
    found = find_checkpoint(place.absolute())
    require_whole(found)
    return found.path


def verify(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    *,
    steps: int = 20,
    samples: bool = False,
    show: bool = True,
    by_name: bool = True,
    quick: bool = False,
    fresh: bool = False,
) -> list[Record]:
    """Compare each layout with one device over `steps` updates; one Record for each.

    `samples` also audits that each sample is read once in every epoch and counted once in evaluation. A layout that the
    workload cannot have is refused where it was asked for `by_name`, else it is not verified, with the reason; where
    none of the layouts can be had, that is raised. `quick` compares six updates in float64 alone; `fresh` runs `single`
    anew, whatever an earlier call has kept. A difference is no error: it is in `Record.parity`. Raises what `run`
    raises.
    """
    _at_least_1(steps=steps)
    for layout in layouts:
        layout.mesh(launch.processes)
    options = VerifyOptions(_command(), steps, samples, show, by_name, quick, fresh)
    results = run_ranks(
        launch, Named("everyrank.tasks.verify:verify_rank"), _sent(workload), list(layouts), launch, options
    )
    return _some_were_possible(results.get(0) or [])


def _some_were_possible(records: list[Record]) -> list[Record]:
    """The Records. Raises `UnsupportedLayoutError` where the workload can have none of these layouts."""
    if records and all(record.parity.status == "refused" for record in records):
        raise UnsupportedLayoutError(records[0].parity.reason or "")
    return records


def bench(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    *,
    trials: int = 5,
    steps: int | None = None,
    batch_factor: int = 1,
    show: bool = True,
    by_name: bool = True,
    kept: list[Record] | None = None,
) -> list[Record]:
    """Check each layout as `verify` does and time those that are equal; one Record for each.

    `steps` is the number of updates of a trial and of the untimed run before; `batch_factor` multiplies the global
    batch; `by_name` as for `verify`. Raises what `run` raises; `kept` has by then what was known, also after Ctrl-C.
    """
    _at_least_1(trials=trials, steps=steps)
    for layout in layouts:
        layout.mesh(launch.processes)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    options = BenchOptions(
        _command(), time.time(), trials, steps, load_before=load, batch_factor=batch_factor, show=show, by_name=by_name
    )
    sent, partial = _sent(workload), dict[int, list[Record]]()
    try:
        target = Named("everyrank.tasks.bench:bench_rank")
        results = run_ranks(launch, target, sent, list(layouts), launch, options, kept=partial)
    except BaseException:
        if kept is not None:
            kept[:] = partial.get(0, [])
        raise
    return _some_were_possible(results.get(0) or [])


def bench_scaling(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    processes: Sequence[int],
    *,
    trials: int = 5,
    steps: int | None = None,
    show: bool = True,
    by_name: bool = True,
    kept: list[Record] | None = None,
) -> list[Record]:
    """`bench` on each number of ranks, which begin with 1; two Records for each layout on more than one.

    Strong scaling keeps the global batch; weak scaling keeps the batch of each rank, so that the global batch grows.
    The efficiency in `Record.scaling` is the throughput divided by the ranks and by that of the same layout on one
    rank. Each number of ranks is a launch of its own: their trials are not interleaved. `kept` as for `bench`.
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
            if show and len(sizes) > 1:
                row_known("1 rank:" if size == 1 else f"{size} ranks, {kind} scaling:")
            partial: list[Record] = []
            again = functools.partial(bench, workload, shown, here, trials=trials, steps=steps, by_name=by_name)
            try:
                made = again(batch_factor=factor, show=show, kept=partial)
            except BaseException as error:
                if not records or not isinstance(error, EveryrankError):
                    if kept is not None:
                        kept[:] = records + [_with_efficiency(row, base.get(row.layout, row), kind) for row in partial]
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
