"""The Python API: run, verify, bench and predict. They start ranks, wait for them and return Records.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from everyrank.errors import EveryrankError, LayoutError, StoppedError, UnsupportedLayoutError, UsageError
from everyrank.fields import check_fields
from everyrank.launch import (
    CPU_PROCESSES,
    Launch,
    catch_signals,
    num_accelerators,
    rank_info_from_environment,
    run_ranks,
)
from everyrank.launch.launcher import DEFAULT_LAUNCHER
from everyrank.layout import Layout, check_reference, parse_layout
from everyrank.options import AUTO, GUARDS, BenchOptions, PredictOptions, TrainOptions, VerifyOptions, check_minimums
from everyrank.prediction.files import check_predictions_suffix
from everyrank.progress import print_row
from everyrank.record import Interval, Parity, Record, Scaling
from everyrank.runs import LENGTHS, find_checkpoint, require_whole
from everyrank.workload import HIDDEN_NAME, Source, Workload, check_place

__all__ = ["bench", "check_fewer_ranks", "keep_trace", "predict", "run", "verify"]

_Options = TypeVar("_Options", TrainOptions, PredictOptions, VerifyOptions, BenchOptions)


def run(
    workload: Workload | Source | str,
    layout: Layout | str,
    launch: Launch | str | None = None,
    *,
    options: TrainOptions | None = None,
    **changes: Any,
) -> list[Record]:
    """Train `workload` under `layout` on the ranks that `launch` starts. Same as `everyrank train`.

    Args:
        workload: A `Workload`, or as on the command line: a built-in name, or "path/file.py[:name]".
        layout: A `Layout`, or its text: "fsdp:precision=bf16".
        launch: A `Launch`, or the name of a launcher. None: here, on as many processes as there are GPUs; without a
            GPU on 2, or on 1 for a layout of one process.
        options: The options of `everyrank train`.
        **changes: Fields of `TrainOptions` by name.

    Returns:
        A list of one Record. If torchrun started this process as a rank, ranks other than 0 get an empty list.

    Raises:
        UsageError: The call or the workload is wrong.
        RankFailedError: A rank failed.
        StoppedError: SIGTERM or SIGUSR1 asked to stop. The update in progress is then done and saved.

    Examples:
        >>> from everyrank import run
        >>> [record] = run("digits", "ddp", steps=3, show=False)
        >>> len(record.loss)
        3
    """
    workload, layout = _workload_of(workload), _layout_of(layout)
    launch, options = _launch_of(launch, [layout]), _completed(TrainOptions, options or TrainOptions(), changes)
    if options.epochs is not None and options.steps is not None:
        raise UsageError(f"--epochs {options.epochs} --steps {options.steps}: give one of the two")
    _check_choices(options)
    layout.check_processes(launch.processes)
    if not options.evaluate:
        check_fewer_ranks(layout, launch, options.out)
    options = dataclasses.replace(
        options,
        out=_absolute(options.out),
        resume=_checkpoint(options.resume),
        pretrained=_absolute(options.pretrained),
        profile=_absolute(options.profile),
        trackers=tuple(options.trackers),
    )
    sent = _sent(workload, options.resume)
    is_open = options.resume is not None and options.epochs is None and options.steps is None
    if is_open and isinstance(workload, Source) and isinstance(sent, Source):
        options = dataclasses.replace(options, epochs=sent.epochs, steps=sent.steps)
    with catch_signals(signal.SIGTERM, signal.SIGUSR1) as stop:
        try:
            results = run_ranks(launch, "everyrank.train.rank:train_rank", sent, layout, launch, options, stop=stop)
        except StoppedError as error:
            if stop.asked is not None:
                error.exit_status = 128 + stop.asked
            raise
    record = results.get(0)
    return [record] if record is not None else []


def _check_choices(options: TrainOptions) -> None:
    """Raise `UsageError` for values that the command line could not pass."""
    if isinstance(options.save_every, str) and options.save_every != AUTO:
        raise UsageError(f"--save-every {options.save_every}: give a number of updates, 0, or {AUTO}")
    if not options.mtbf > 0:
        raise UsageError(f"--mtbf {options.mtbf:g}: give the hours between two failures, more than 0")
    if options.guard not in (None, *GUARDS):
        raise UsageError(f"--guard {options.guard}: give one of {', '.join(GUARDS)}")


def predict(
    workload: Workload | Source | str, layout: Layout | str, launch: Launch | str | None, options: PredictOptions
) -> int:
    """Write the model's predictions for the held-out data to `options.out`, in the order of the data; how many.

    The end of the name says how: .jsonl (a row for each sample) or .npy (one array). Raises what `run` raises.
    """
    workload, layout = _workload_of(workload), _layout_of(layout)
    launch, options = _launch_of(launch, [layout]), _completed(PredictOptions, options, {})
    check_predictions_suffix(options.out)
    if options.resume is None and options.pretrained is None:
        raise UsageError("predict needs a trained model: --resume DIR (a run or a checkpoint), or --pretrained FILE")
    if options.resume is not None and options.pretrained is not None:
        raise UsageError("--resume and --pretrained: both give weights; use one of the two")
    layout.check_processes(launch.processes)
    options = dataclasses.replace(
        options,
        out=options.out.absolute(),
        resume=_checkpoint(options.resume),
        pretrained=_absolute(options.pretrained),
    )
    sent = _sent(workload, options.resume)
    results = run_ranks(launch, "everyrank.prediction.rank:predict_rank", sent, layout, launch, options)
    return results.get(0) or 0


def check_fewer_ranks(layout: Layout, launch: Launch, out: Path | None) -> None:
    """Check that a training can continue with fewer ranks: each number has to make a mesh of the layout.

    Raises `LayoutError` for a number that does not, and `UsageError` without a folder to resume from.
    """
    fewer = launch.fewer_processes
    if fewer is None:
        return
    has_nodes = launch.min_nodes is not None
    flag = f"--nodes {launch.min_nodes}:{launch.nodes}" if has_nodes else f"--min-processes {fewer.start}"
    if out is None:
        raise UsageError(
            f"{flag}: give --out DIR, a folder that all hosts share: those that go on without one that was lost look "
            "for its checkpoints there"
        )
    for count in fewer:
        try:
            layout.mesh(count)
        except LayoutError as error:
            raise LayoutError(f"{flag}, with {count} ranks left: {error}") from None


def _checkpoint(path: Path | None) -> Path | None:
    """The folder of the checkpoint that a run, or the checkpoint itself, stands for; its files have their sizes."""
    if path is None:
        return None
    checkpoint = find_checkpoint(path.absolute())
    require_whole(checkpoint)
    return checkpoint.path


def verify(
    workload: Workload | Source | str,
    layouts: Sequence[Layout | str] | str,
    launch: Launch | str | None = None,
    *,
    options: VerifyOptions | None = None,
    **changes: Any,
) -> list[Record]:
    """Compare each layout with one device, update by update. Same as `everyrank verify`.

    A difference raises no error: it is in `Record.parity`. A layout that the workload does not support is refused in
    its Record, with the reason.

    Args:
        workload: As for `run`.
        layouts: One or more layouts, as `Layout` or as text.
        launch: As for `run`.
        options: The options of `everyrank verify`.
        **changes: Fields of `VerifyOptions` by name. For example, `reference="fsdp:meta=true"` compares with this
            layout if the model does not fit one device.

    Returns:
        One Record for each layout.

    Raises:
        UsageError: The call or the workload is wrong.
        UnsupportedLayoutError: The workload supports none of the layouts.
        RankFailedError: A rank failed.

    Examples:
        >>> from everyrank import verify
        >>> records = verify("digits", ["ddp", "fsdp"], steps=3, quick=True, show=False)
        >>> [(record.layout, record.parity.status) for record in records]
        [('ddp', 'equal'), ('fsdp', 'equal')]
    """
    workload, layouts = _workload_of(workload), _layouts_of(layouts)
    if isinstance(changes.get("reference"), Layout):
        changes["reference"] = str(changes["reference"])
    launch, options = _launch_of(launch, layouts), _completed(VerifyOptions, options or VerifyOptions(), changes)
    reference = parse_layout(options.reference) if options.reference is not None else None
    for layout in layouts if options.explicit else ():
        layout.mesh(launch.processes)
        if reference is not None:
            check_reference(layout, reference, launch.processes)
    results = run_ranks(launch, "everyrank.parity.rank:verify_rank", _sent(workload), list(layouts), launch, options)
    return _require_any_supported(results.get(0) or [])


def keep_trace(
    workload: Workload | Source | str, *, options: VerifyOptions | None = None, **changes: Any
) -> dict[str, Any]:
    """Run the first updates of `workload` on one process in float64; what `everyrank verify --save` writes.

    `options` are those of `everyrank verify`. Compare two results with `everyrank.parity.kept.compare_kept`. Raises
    what `run` raises.
    """
    workload = _workload_of(workload)
    launch = Launch(processes=1, device="cpu")
    options = _completed(VerifyOptions, options or VerifyOptions(), changes)
    results = run_ranks(launch, "everyrank.parity.rank:keep_rank", _sent(workload), launch, options)
    return results[0]


def _require_any_supported(records: list[Record]) -> list[Record]:
    """Return the Records. Raises `UnsupportedLayoutError` if the workload supports none of these layouts."""
    if records and all(record.parity.status == "refused" for record in records):
        raise UnsupportedLayoutError(records[0].parity.reason or "")
    return records


def bench(
    workload: Workload | Source | str,
    layouts: Sequence[Layout | str] | str,
    launch: Launch | str | None = None,
    *,
    options: BenchOptions | None = None,
    kept: list[Record] | None = None,
    **changes: Any,
) -> list[Record]:
    """Check each layout like `verify`, and measure the speed of those that are equal. Same as `everyrank bench`.

    Args:
        workload: As for `run`.
        layouts: One or more layouts, as `Layout` or as text.
        launch: As for `run`.
        options: The options of `everyrank bench`.
        kept: If an error or Ctrl-C ends the call, this list has the Records so far.
        **changes: Fields of `BenchOptions` by name.

    Returns:
        One Record for each layout.

    Raises:
        UsageError: The call or the workload is wrong.
        UnsupportedLayoutError: The workload supports none of the layouts.
        RankFailedError: A rank failed.

    Examples:
        >>> from everyrank import bench
        >>> [record] = bench("digits", "ddp", trials=1, steps=3, verify_steps=3, show=False)
        >>> record.throughput_samples_per_second.trials
        1
    """
    workload, layouts = _workload_of(workload), _layouts_of(layouts)
    launch, options = _launch_of(launch, layouts), _completed(BenchOptions, options or BenchOptions(), changes)
    for name in ("verify_steps", "batch_factor"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name}={getattr(options, name)}: give at least 1")
    for layout in layouts if options.explicit else ():
        layout.mesh(launch.processes)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    options = dataclasses.replace(options, load_before=load)
    sent, partial = _sent(workload), dict[int, list[Record]]()
    try:
        target = "everyrank.benchmark.rank:bench_rank"
        results = run_ranks(launch, target, sent, list(layouts), launch, options, kept=partial)
    except BaseException:
        if kept is not None:
            kept[:] = partial.get(0, [])
        raise
    return _require_any_supported(results.get(0) or [])


def _workload_of(given: Workload | Source | str) -> Workload | Source:
    if isinstance(given, str):
        return Source(given)
    if not isinstance(given, Workload | Source):
        raise UsageError(
            f"workload={given!r}: give a Workload, a built-in name or a file; find_workload(...) makes one"
        )
    return given


def _layout_of(given: Layout | str) -> Layout:
    if isinstance(given, str):
        return parse_layout(given)
    if not isinstance(given, Layout):
        raise UsageError(f'layout={given!r}: give a Layout, or its text, like "fsdp:precision=bf16"')
    return given


def _layouts_of(given: Sequence[Layout | str] | str) -> list[Layout]:
    if not isinstance(given, str | Layout | Iterable):
        raise UsageError(f'layouts={given!r}: give one or more, like ["ddp"]')
    layouts = [given] if isinstance(given, str | Layout) else list(given)
    if not layouts:
        raise UsageError('layouts=[]: give at least one, like ["ddp"]')
    return [_layout_of(layout) for layout in layouts]


def _launch_of(given: Launch | str | None, layouts: Sequence[Layout]) -> Launch:
    """Return the launch, with the number of processes of the command line if none is given."""
    if isinstance(given, Launch):
        return given
    if given is not None and not isinstance(given, str):
        raise UsageError(f'launch={given!r}: give a Launch, or the name of a launcher, like "torchrun"')
    info = rank_info_from_environment(os.environ)
    if info is not None:
        processes = info.size
    elif all(layout.axis is None for layout in layouts):
        processes = 1
    else:
        processes = num_accelerators() or CPU_PROCESSES
    return Launch(given or DEFAULT_LAUNCHER, processes=processes)


def _completed(kind: type[_Options], options: _Options, changes: dict[str, Any]) -> _Options:
    """Complete the options with keyword arguments, the command and the start time. Raises `UsageError`."""
    if not isinstance(options, kind):
        raise UsageError(f"options={options!r}: give {kind.__name__}(...), or its fields as keywords")
    completed = dataclasses.replace(options, **changes, command=_command(), started=time.time())
    check_fields(completed)
    check_minimums(completed)
    return completed


def _absolute(path: Path | None) -> Path | None:
    return path.absolute() if path is not None else None


def _sent(workload: Workload | Source, resumed: Path | None = None) -> Workload | Source:
    """Return what is sent to the ranks: the source of the workload, or without one the object by value.

    A source takes open settings from the `resumed` checkpoint. A workload changed by `dataclasses.replace` has no
    source. Its functions may be from a file that ranks cannot import by name.
    """
    sent = workload.source or workload if isinstance(workload, Workload) else workload
    if isinstance(sent, Source):
        check_place(sent.place)
        if resumed is not None and sent is workload:
            sent = _with_saved_settings(sent, resumed)
    else:
        for name, module in list(sys.modules.items()):
            if name.startswith(HIDDEN_NAME):
                cloudpickle.register_pickle_by_value(module)
    return sent


def _with_saved_settings(source: Source, checkpoint: Path) -> Source:
    """Fill in settings, batch and length from a checkpoint if the call does not give them."""
    metadata = find_checkpoint(checkpoint).metadata
    saved = {name: value for name, value in metadata.settings.items() if name not in LENGTHS}
    lengths = {name: metadata.settings[name] for name in LENGTHS if name in metadata.settings}
    if source.epochs is not None or source.steps is not None or any(name in source.settings for name in LENGTHS):
        lengths = {}
    has_batch = source.batch is None and "batch" not in source.settings and "--lr-rule" in metadata.settings
    batch = {"batch": metadata.global_batch, "lr_rule": metadata.settings["--lr-rule"]} if has_batch else {}
    return dataclasses.replace(source, saved=saved, **lengths, **batch)


def _command() -> list[str]:
    """Return the typed command without the path of the program."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return ["everyrank" if name in ("everyrank", "__main__.py") else name, *sys.argv[1:]]


# --- a bench on several numbers of ranks


def bench_scaling(
    workload: Workload | Source,
    layouts: Sequence[Layout],
    launch: Launch,
    processes: Sequence[int],
    *,
    options: BenchOptions | None = None,
    kept: list[Record] | None = None,
) -> list[Record]:
    """`bench` on each number of ranks, which begin with 1; two Records for each layout on more than one.

    Strong scaling keeps the global batch; weak scaling keeps the batch of each rank, so that the global batch grows.
    The efficiency in `Record.scaling` is the throughput divided by the ranks and by that of the same layout on one
    rank. Each number of ranks is a launch of its own: their trials are not interleaved. `kept` as for `bench`.
    """
    options = options or BenchOptions()
    sizes = _checked_sizes(processes)
    runs = [(1, "strong"), *((size, kind) for size in sizes[1:] for kind in ("strong", "weak"))]
    distributed = [layout for layout in layouts if layout.axis is not None]
    records: list[Record] = []
    base: dict[str, Record] = {}
    for size, kind in runs:
        shown = layouts if size == 1 else distributed
        if not shown:
            continue
        if options.show and len(sizes) > 1:
            print_row("1 rank:" if size == 1 else f"{size} ranks, {kind} scaling:")
        launch_of_size = dataclasses.replace(launch, processes=size)
        scaled = dataclasses.replace(options, batch_factor=size if kind == "weak" else 1)
        partial: list[Record] = []
        try:
            made = bench(workload, shown, launch_of_size, options=scaled, kept=partial)
        except BaseException as error:
            if not records or not isinstance(error, EveryrankError):
                if kept is not None:
                    kept[:] = records + [_with_efficiency(row, base.get(row.layout, row), kind) for row in partial]
                raise
            # keep the results of smaller sizes
            made = [_not_verified(records[0], layout, size, str(error)) for layout in shown]
        base = base or {record.layout: record for record in made}
        records += [_with_efficiency(record, base[record.layout], kind) for record in made]
    return records


def _checked_sizes(processes: Sequence[int]) -> list[int]:
    """Return the numbers of ranks without duplicates. Raises `UsageError` if they do not increase from 1."""
    sizes = list(dict.fromkeys(processes))
    if sizes[0] != 1 or sorted(sizes) != sizes:
        given = " ".join(map(str, processes))
        raise UsageError(f"--processes {given}: scaling is measured relative to one rank; begin with 1")
    return sizes


def _not_verified(like: Record, layout: Layout, size: int, reason: str) -> Record:
    parity = Parity("not_verified", reason=reason)
    where = (like.launcher, like.backend, like.device, size)
    return Record(like.workload, str(layout), *where, parity=parity, provenance=like.provenance)


def _with_efficiency(record: Record, base: Record, kind: str) -> Record:
    """Return the Record with its efficiency, and the widest interval that both intervals allow."""
    speed, base_speed = record.throughput_samples_per_second, base.throughput_samples_per_second
    if record is base or speed is None or base_speed is None:
        return record
    size = record.world_size
    efficiency = Interval(
        speed.median / base_speed.median / size,
        speed.low / base_speed.high / size,
        speed.high / base_speed.low / size,
        min(speed.trials, base_speed.trials),
    )
    return dataclasses.replace(record, scaling=Scaling(kind, efficiency))
