"""train_rank: what one rank does for `everyrank train`, to train or to evaluate a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from everyrank.checkpoint import load_model, resume, with_pretrained
from everyrank.data import make_updates, resume_problem
from everyrank.errors import UsageError, WorkloadError
from everyrank.launch import Launch, RankInfo, Stop, catch_signals
from everyrank.launch.autopsy import FOLDER, current_state, keep_state
from everyrank.layout import Layout
from everyrank.loop import open_data, wrap_user_errors
from everyrank.measure.provenance import provenance
from everyrank.options import TrainOptions
from everyrank.record import Record
from everyrank.runs import (
    CheckpointMetadata,
    changed_lengths,
    checkpoint_named,
    hold,
    newest_whole,
    set_aside_newer,
)
from everyrank.strategies import Prepared, prepare
from everyrank.train.display import Display, announce, summary_line
from everyrank.train.job import TrainingJob, evaluate_job, make_metadata
from everyrank.train.training import Training
from everyrank.workload import Source, Workload, changed, load
from everyrank.world import World, from_rank_0, on_rank_0, open_world
from everyrank.world.calls import recorded_calls

__all__ = ["chosen_kernels", "train_rank"]

_DEBOUNCE_SECONDS = 0.5  # a second SIGTERM within this time is ignored


def train_rank(
    info: RankInfo,
    workload_or_source: Source | Workload,
    layout: Layout,
    launch: Launch,
    options: TrainOptions,
    stop: Stop | None = None,
) -> Record | None:
    """Train, or only evaluate, on this rank. Returns the Record on rank 0, None on the other ranks.

    `stop` holds the signal handlers if this process installed them before it became a rank. Raises `StoppedError`
    after a stop request, when the update in progress is done and saved.
    """
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(_stop_handlers(launch))
        world = stack.enter_context(open_world(info, launch))
        stack.enter_context(chosen_kernels(options, world.device))
        options = _use_folders_of_rank_0(options, world, launch.restarts_ranks or info.restart_count > 0)
        out = options.out if not options.evaluate else None
        if out is not None:
            on_rank_0(world, "lock", lambda: stack.enter_context(hold(out, _job_name(launch))))
            _publish_state(out, world)
        workload = _load_workload(workload_or_source, options)
        train_data, eval_data = open_data(workload, world, counts_uneven=False)
        if options.evaluate and eval_data is None:
            raise WorkloadError(f"--evaluate: workload {workload.name} has no eval_data")
        prepared = _prepare(workload, layout, world)
        job = TrainingJob(prepared, train_data, eval_data)
        metadata = make_metadata(job, options)
        display = Display(world.rank == 0 and options.show)
        start_step, position = _resume(job, options, metadata, display) if options.resume is not None else (0, {})
        if options.evaluate:
            results: dict[str, Any] = {"metrics": evaluate_job(job)}
        else:
            updates = make_updates(job.prepared.workload, job.train_data, start_step, position)
            training = Training(job, options, metadata, updates, display, stop)
            announce(
                prepared, options, start_step, updates.end, display, changes_size=launch.fewer_processes is not None
            )
            results = training.run()
            del training
        del prepared, job
        if world.rank != 0:
            return None
        record = Record(
            workload=workload.name,
            layout=str(layout),
            launcher=info.started_by,
            backend=world.backend,
            device=world.device.type,
            world_size=world.size,
            provenance=provenance(workload, train_data, world, options.command) | _resumed_from(options, start_step),
            **results,
        )
        display.line(summary_line(record, start_step))
        return record


def _stop_handlers(launch: Launch) -> contextlib.AbstractContextManager[Stop]:
    """Install the handlers of stop signals."""
    # if the launcher sends SIGTERM when another rank has died, only SIGUSR1 is a stop request
    sigterm_means_failure = launch.rank_launcher.terminates_on_failure
    stop_signals = [signal.SIGUSR1] if sigterm_means_failure else [signal.SIGTERM, signal.SIGUSR1]
    return catch_signals(*stop_signals, same_seconds=_DEBOUNCE_SECONDS)


def _job_name(launch: Launch) -> str:
    """Return a name that is the same in all restarts of a job: the address of its rendezvous."""
    return launch.rendezvous or "" if launch.restarts_ranks else ""


def _publish_state(out: Path, world: World) -> None:
    """Publish this rank's state for a hang autopsy, if an external launcher has started it."""
    if current_state() is None:
        job = from_rank_0(world, "job", lambda: uuid.uuid4().hex)
        state = keep_state(out / "ranks" / FOLDER, world.rank, world.size, job)
        if state is not None:
            state.calls = recorded_calls


def _load_workload(workload_or_source: Source | Workload, options: TrainOptions) -> Workload:
    """Load the workload, with `--epochs`, `--steps` and `--pretrained`."""
    if isinstance(workload_or_source, Source):  # the workload's function may build the schedule for this length
        workload_or_source = dataclasses.replace(workload_or_source, epochs=options.epochs, steps=options.steps)
    workload = load(workload_or_source)
    if options.epochs is not None or options.steps is not None:
        workload = changed(workload, epochs=options.epochs, steps=options.steps)
    if options.pretrained is not None:
        workload = with_pretrained(workload, options.pretrained)
    return workload


def _prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Prepare the workload under a layout. Raises `WorkloadError` if a tensor cannot be saved."""
    with wrap_user_errors():
        prepared = prepare(workload, layout, world)
    if prepared.not_saved:
        raise WorkloadError(
            f"layout {layout}: {prepared.not_saved[0]} is split over the ranks, but is not a DTensor, so it cannot "
            "be saved; make it a DTensor, or use only verify and bench"
        )
    return prepared


def _use_folders_of_rank_0(options: TrainOptions, world: World, may_be_restarted: bool) -> TrainOptions:
    """Take over rank 0's folders, because under an external launcher each rank may have generated a name.

    `may_be_restarted`: the launcher may have restarted these ranks, which then resume from the newest checkpoint.
    """
    paths = {"out": options.out, "resume": options.resume}
    if world.rank == 0 and may_be_restarted and options.out is not None and not options.evaluate:
        newest = newest_whole(options.out)
        paths["resume"] = newest.path if newest is not None else options.resume
    paths_on_rank_0 = from_rank_0(
        world, "folders", lambda: {name: str(path) if path else None for name, path in paths.items()}
    )
    return dataclasses.replace(
        options, **{name: Path(path) if path else None for name, path in paths_on_rank_0.items()}
    )


def _resume(
    job: TrainingJob, options: TrainOptions, metadata: CheckpointMetadata, display: Display
) -> tuple[int, dict[str, int]]:
    """Load the checkpoint. Returns the number of updates done and the position in the epochs.

    `--evaluate` loads only the model, so that other settings may differ.
    """
    assert options.resume is not None
    checkpoint = checkpoint_named(options.resume)
    start_step, position = checkpoint.metadata.step, dict(checkpoint.metadata.place)
    if options.evaluate:
        load_model(job.prepared, job.prepared.world, checkpoint)
        return start_step, position
    check_remaining_updates(job, options.resume, start_step, position)
    resume(job.prepared, job.prepared.world, checkpoint, metadata)
    for name, lengths in changed_lengths(checkpoint.metadata, metadata).items():
        if job.prepared.workload.schedule is None:
            continue  # the learning rates do not depend on the length
        old, new = (f"{value} {name}" if value is not None else "the workload's own length" for value in lengths)
        display.line(f"the learning-rate schedule is for {new} from update {start_step} on; before, it was for {old}")
    if options.out is not None and checkpoint.path.parent.parent.resolve() == options.out.resolve():
        on_rank_0(job.prepared.world, "set aside newer checkpoints", lambda: set_aside_newer(checkpoint))
    return start_step, position


def _resumed_from(options: TrainOptions, start_step: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if options.resume is not None:
        fields = {"resumed_from": str(options.resume), "resumed_at_update": start_step}
    if options.pretrained is not None:
        fields["pretrained"] = str(options.pretrained)
    return fields


# --- the remaining updates


def check_remaining_updates(job: TrainingJob, resumed: Path, start_step: int, position: dict[str, int]) -> None:
    """Raise `UsageError` if the checkpoint has already done the requested updates."""
    problem = resume_problem(job.prepared.workload, job.train_data, start_step, position)
    if problem is not None:
        raise UsageError(f"{resumed}: {problem}")


# --- kernels: docs/training.md lists the cost of each setting; both are off by default


@contextlib.contextmanager
def chosen_kernels(options: TrainOptions, device: torch.device) -> Generator[None]:
    """Select deterministic or benchmarked kernels during a training, and restore torch's settings at the end.

    Raises `UsageError` for both at once, and for --deterministic on CUDA without CUBLAS_WORKSPACE_CONFIG.
    """
    if options.cudnn_benchmark and options.deterministic:
        raise UsageError(
            "--cudnn-benchmark and --deterministic: the fastest kernel may be a different one in the next run; give one"
        )
    if options.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UsageError(
            "--deterministic on cuda: cuBLAS is deterministic only with a fixed workspace; put "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in front of the command"
        )
    benchmark_before = torch.backends.cudnn.benchmark
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    warn_only_before = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic_settings: Any = torch.utils.deterministic
    fill_before = deterministic_settings.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        # filling every torch.empty with NaN would cost time
        deterministic_settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark_before
        torch.use_deterministic_algorithms(deterministic_before, warn_only=warn_only_before)
        deterministic_settings.fill_uninitialized_memory = fill_before
