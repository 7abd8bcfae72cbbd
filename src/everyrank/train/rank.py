"""What one rank is asked to do: train, or evaluate what was trained."""

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
    About,
    changed_lengths,
    checkpoint_named,
    hold,
    newest_whole,
    set_aside_newer,
)
from everyrank.strategies import Prepared, prepare
from everyrank.train.display import Display, announce, how_it_ended
from everyrank.train.job import TrainingJob, about_of, evaluate_job
from everyrank.train.training import Training
from everyrank.workload import Source, Workload, changed, load
from everyrank.world import World, from_rank_0, on_rank_0, open_world
from everyrank.world.calls import recorded_calls

__all__ = ["chosen_kernels", "train_rank"]

_SAME_SECONDS = 0.5  # between two SIGTERM that are one


def train_rank(
    info: RankInfo,
    what: Source | Workload,
    layout: Layout,
    launch: Launch,
    options: TrainOptions,
    stop: Stop | None = None,
) -> Record | None:
    """Train in this rank, or evaluate alone; the Record on rank 0, None elsewhere.

    `stop` is who hears a request to stop, where this process was listening before it was a rank. Raises
    `StoppedError` after such a request, when the update in progress is done and saved.
    """
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(_listening(launch))
        world = stack.enter_context(open_world(info, launch))
        stack.enter_context(chosen_kernels(options, world.device))
        options = _agreed(options, world, launch.restarts_ranks or info.restart_count > 0)
        out = options.out if not options.evaluate else None
        if out is not None:
            on_rank_0(world, "lock", lambda: stack.enter_context(hold(out, _job_name(launch))))
            _keep_state(out, world)
        workload = _loaded(what, options)
        train_data, eval_data = open_data(workload, world, counts_uneven=False)
        if options.evaluate and eval_data is None:
            raise WorkloadError(f"--evaluate: workload {workload.name} has no eval_data")
        prepared = _prepared(workload, layout, world)
        job = TrainingJob(prepared, train_data, eval_data)
        about = about_of(job, options)
        display = Display(world.rank == 0 and options.show)
        begin, place = _go_on(job, options, about, display) if options.resume is not None else (0, {})
        if options.evaluate:
            results: dict[str, Any] = {"metrics": evaluate_job(job)}
        else:
            updates = make_updates(job.prepared.workload, job.train_data, begin, place)
            training = Training(job, options, about, updates, display, stop)
            announce(prepared, options, begin, updates.end, display, changes_size=launch.fewer_processes is not None)
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
            provenance=provenance(workload, train_data, world, options.command) | _origin(options, begin),
            **results,
        )
        display.line(how_it_ended(record, begin))
        return record


def _listening(launch: Launch) -> contextlib.AbstractContextManager[Stop]:
    """Who hears a request to stop from here on."""
    # where SIGTERM says that another rank has died, a request to stop is SIGUSR1 alone
    is_end = launch.rank_launcher.terminates_ranks
    heard = [signal.SIGUSR1] if is_end else [signal.SIGTERM, signal.SIGUSR1]
    return catch_signals(*heard, same_seconds=_SAME_SECONDS)


def _job_name(launch: Launch) -> str:
    """The same in all starts of a job that is started again, on whichever host rank 0 is: where its hosts meet."""
    return launch.rendezvous or "" if launch.restarts_ranks else ""


def _keep_state(out: Path, world: World) -> None:
    """For whoever asks why this rank hangs, where no launcher of ours has started it, and so nobody keeps one yet."""
    if current_state() is None:
        job = from_rank_0(world, "job", lambda: uuid.uuid4().hex)
        state = keep_state(out / "ranks" / FOLDER, world.rank, world.size, job)
        if state is not None:
            state.calls = recorded_calls


def _loaded(what: Source | Workload, options: TrainOptions) -> Workload:
    """The workload with the length and the first weights that the options ask for."""
    if isinstance(what, Source):  # the function that makes it may build its schedule on its length
        what = dataclasses.replace(what, epochs=options.epochs, steps=options.steps)
    workload = load(what)
    if options.epochs is not None or options.steps is not None:
        workload = changed(workload, epochs=options.epochs, steps=options.steps)
    if options.pretrained is not None:
        workload = with_pretrained(workload, options.pretrained)
    return workload


def _prepared(workload: Workload, layout: Layout, world: World) -> Prepared:
    """The workload under a layout that a checkpoint can hold."""
    with wrap_user_errors():
        prepared = prepare(workload, layout, world)
    if prepared.not_saved:
        raise WorkloadError(
            f"layout {layout}: {prepared.not_saved[0]} lies on the ranks in a way that no DTensor tells: no "
            "checkpoint could hold it; verify and bench alone take such a layout"
        )
    return prepared


def _agreed(options: TrainOptions, world: World, goes_on: bool) -> TrainOptions:
    """Rank 0's folders: where others start the ranks, each has looked for itself, and made up a name of its own.

    `goes_on`: a launcher may have started these ranks again, or on a host that came later. They go on from what is
    saved now, whatever was there when the command was typed.
    """
    places = {"out": options.out, "resume": options.resume}
    if world.rank == 0 and goes_on and options.out is not None and not options.evaluate:
        newest = newest_whole(options.out)
        places["resume"] = newest.path if newest is not None else options.resume
    told = from_rank_0(world, "places", lambda: {name: str(place) if place else None for name, place in places.items()})
    return dataclasses.replace(options, **{name: Path(place) if place else None for name, place in told.items()})


def _go_on(job: TrainingJob, options: TrainOptions, about: About, display: Display) -> tuple[int, dict[str, int]]:
    """Put the training where the checkpoint left it; the number of updates done, and their place in the epochs.

    An evaluation needs the model only, whatever else has changed since.
    """
    assert options.resume is not None
    checkpoint = checkpoint_named(options.resume)
    begin, place = checkpoint.about.step, dict(checkpoint.about.place)
    if options.evaluate:
        load_model(job.prepared, job.prepared.world, checkpoint)
        return begin, place
    check_left(job, options.resume, begin, place)
    resume(job.prepared, job.prepared.world, checkpoint, about)
    for name, lengths in changed_lengths(checkpoint.about, about).items():
        old, new = (f"{value} {name}" if value is not None else "the workload's own length" for value in lengths)
        display.line(f"learning rates: from update {begin} on those of {new}, before that those of {old}")
    if options.out is not None and checkpoint.path.parent.parent.resolve() == options.out.resolve():
        on_rank_0(job.prepared.world, "leave behind", lambda: set_aside_newer(checkpoint))
    return begin, place


def _origin(options: TrainOptions, begin: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.resume is not None:
        found = {"resumed_from": str(options.resume), "resumed_at_update": begin}
    if options.pretrained is not None:
        found["pretrained"] = str(options.pretrained)
    return found


# --- the updates that this training has before it


def check_left(job: TrainingJob, resumed: Path, begin: int, place: dict[str, int]) -> None:
    """Raise `UsageError` where more is done already than is asked for."""
    problem = resume_problem(job.prepared.workload, job.train_data, begin, place)
    if problem is not None:
        raise UsageError(f"{resumed}: {problem}")


# --- kernels: neither setting is on unless asked for; docs/training.md says what each costs


@contextlib.contextmanager
def chosen_kernels(options: TrainOptions, device: torch.device) -> Generator[None]:
    """While a training runs with the kernels that were asked for; afterwards torch has its settings back.

    Raises `UsageError` for both at once, and for deterministic ones on CUDA without what cuBLAS needs for them.
    """
    if options.cudnn_benchmark and options.deterministic:
        raise UsageError(
            "--cudnn-benchmark and --deterministic: what is fastest may be another kernel in the next run; give one"
        )
    if options.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UsageError(
            "--deterministic on cuda: cuBLAS repeats with a workspace of its own alone; put "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in front of the command"
        )
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        # NaN in all that torch.empty gives would show who reads it, at the cost of writing it
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.use_deterministic_algorithms(before[1])
        memory.fill_uninitialized_memory = fills
