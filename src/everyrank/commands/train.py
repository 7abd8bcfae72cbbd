"""everyrank train"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Generator
from pathlib import Path

from everyrank.commands.launching import launch_of, quiet_launch_of
from everyrank.commands.oom_advice import advising_on_memory
from everyrank.commands.shared import (
    add_common,
    add_options,
    check_html,
    check_writable,
    options_of,
    repeated_arguments,
    say,
    say_next,
    source_of,
)
from everyrank.errors import EveryrankError, RankFailedError, StoppedError, UsageError, printable
from everyrank.launch import slurm
from everyrank.layout import Layout, parse_layout
from everyrank.options import AUTO, GUARDS, TrainOptions
from everyrank.record import Record, write_records, write_text
from everyrank.runs import checkpoints_of, find_checkpoint

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "train a workload under a layout"
EXAMPLES = (
    "everyrank train digits --layout ddp --processes 2 --out runs/first",
    "everyrank train my_workload.py --layout fsdp:precision=bf16 --out runs/mine --resume",
    "everyrank train digits --layout ddp --launcher slurm --nodes 2 --processes 16 --dry-run",
)

_NEWEST = object()  # --resume without a folder: the newest checkpoint in --out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, the launch flags, --layout, and `TrainOptions`."""
    add_common(parser)
    parser.add_argument("--layout", default="single", metavar="L", help="default: single")
    add_options(
        parser,
        TrainOptions,
        resume={"type": _folder_argument, "nargs": "?", "const": _NEWEST},
        save_every={"type": _save_every, "metavar": "K|auto"},
        guard={"choices": GUARDS},
    )
    parser.add_argument("--html", type=Path, metavar="F", help="write a self-contained page of the training")


def _save_every(text: str) -> int | str:
    """Parse a number of updates, or "auto"."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of updates, 0, or auto") from None


def _folder_argument(text: str) -> Path:
    """Parse a folder. Refuses "", which comes from an unset shell variable and would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            '"" is not a folder; give --resume DIR, or --resume without a folder and --out DIR'
        )
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Train or evaluate, write the Record and the requested files; exit status 0.

    Raises what `everyrank.run` raises. Before that, it requeues a Slurm job that is out of time, or that lost a rank
    after its first checkpoint.
    """
    from everyrank import api

    layout, source = parse_layout(args.layout), source_of(args)
    resume = _checkpoint_to_resume(args)
    out = None if args.evaluate else _run_folder(args, layout.strategy, resume)
    if not args.evaluate:
        api.check_fewer_ranks(layout, quiet_launch_of(args, layout), args.out or (out if resume is not None else None))
    launch = launch_of(args, logs=out / "ranks" if out is not None else None, layout=layout)
    layout.mesh(launch.processes)
    files = [out / "log.jsonl", out / "record.json"] if out is not None else []
    for path in (*files, args.json, args.profile):
        check_writable(path)
    check_html(args)
    options = options_of(args, TrainOptions, out=out, resume=resume)
    step_before = _newest_step(out)
    with advising_on_memory():  # outermost, so that a requeue does not wait for it
        try:
            with _reporting_last_checkpoint(out, step_before):
                records = api.run(source, layout, launch, options=options)
        except StoppedError as error:
            is_time_up = error.exit_status == 128 + signal.SIGUSR1  # a SIGTERM may be scancel's
            if args.requeue and is_time_up:
                _requeue(error)
            raise
        except RankFailedError as error:
            # only after progress: a job that fails before its first checkpoint would be requeued forever
            if args.requeue and args.resume is _NEWEST and _newest_step(out) > step_before:
                _requeue(error)
            raise
        except UsageError as error:
            if args.out is None and resume is None and out is not None and error.log is None and not _has_trained(out):
                shutil.rmtree(out, ignore_errors=True)  # the user did not name this folder
                with contextlib.suppress(OSError):  # it has other runs
                    out.parent.rmdir()
            raise
    if records:
        _write(records, args, out)
        if out is not None:
            _say_next(args, layout, launch.processes, out)
    return 0


@contextlib.contextmanager
def _reporting_last_checkpoint(out: Path | None, step_before: int) -> Generator[None]:
    """After Ctrl-C, print the update of the newest checkpoint if it is later than `step_before`."""
    try:
        yield
    except KeyboardInterrupt:
        newest_step = _newest_step(out)
        if newest_step > step_before:
            text = f"the last checkpoint in {printable(str(out))} is of update {newest_step}"
            say(f"{text}; to resume, type the same command with --resume")
        raise


def _say_next(args: argparse.Namespace, layout: Layout, processes: int, out: Path) -> None:
    """Print the commands that check the layout and export the weights."""
    checked_layout, num_ranks = (args.layout, processes) if layout.axis is not None else ("ddp", 2)
    commands = [
        f"everyrank verify {repeated_arguments(args)} --layout {shlex.quote(checked_layout)} --processes {num_ranks}"
    ]
    if checkpoints_of(out):
        commands.append(f"everyrank checkpoint export {shlex.quote(str(out))} model.safetensors")
    say_next(*commands)


def _requeue(error: EveryrankError) -> None:
    """Requeue this Slurm job, if it is one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        print(f"{error}; job {job} is requeued", flush=True)  # before Slurm ends this process
        slurm.requeue(job)


def _newest_step(out: Path | None) -> int:
    """Return the number of updates in the newest checkpoint; 0 without one."""
    checkpoints = checkpoints_of(out) if out is not None else []
    return checkpoints[-1].metadata.step if checkpoints else 0


def _write(records: list[Record], args: argparse.Namespace, out: Path | None) -> None:
    """Write the Record into the folder of the run and to `--json`, and print the paths."""
    if out is not None:
        (out / "record.json").unlink(missing_ok=True)  # because it may be a link to another file
        write_records(records, out / "record.json")
        names = "log.jsonl, log.csv, events.jsonl, epochs.csv and record.json"
        say(f"wrote {printable(str(out))}/{names}{_describe_checkpoints(out)}")
    if args.json is not None:
        write_records(records, args.json)
    if args.html is not None:
        from everyrank.report.page import page

        write_text(args.html, page({"": records}))
        say(f"wrote {printable(str(args.html))}")
    if args.profile is not None and not args.evaluate:
        say(
            f"wrote {printable(str(args.profile))}: one step of all ranks; open it at ui.perfetto.dev or chrome://tracing"
        )


def _checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint to resume from, or None for a new training.

    Raises `UsageError` for two sources of weights, or none to evaluate.
    """
    if args.resume is not None and args.pretrained is not None:
        raise UsageError("--resume and --pretrained: both give weights; use one of the two")
    resume = _requested_checkpoint(args)
    if args.evaluate and resume is None and args.pretrained is None:
        raise UsageError("--evaluate needs a trained model: --resume DIR (a run or a checkpoint), or --pretrained FILE")
    return resume


def _requested_checkpoint(args: argparse.Namespace) -> Path | None:
    if args.resume is None:
        return None
    if args.resume is not _NEWEST:
        return find_checkpoint(args.resume).path
    if args.out is None:
        raise UsageError(
            "--resume: no folder was given; use --resume DIR (a run or a checkpoint), or --out DIR of that run"
        )
    if not args.evaluate and not checkpoints_of(args.out):
        if (args.out / "checkpoints").is_dir() and any((args.out / "checkpoints").glob("step-*[0-9]")):
            find_checkpoint(args.out)  # raises an error that names the damaged checkpoint
        if os.environ.get("RANK", "0") == "0":
            say(f"no checkpoint in {args.out}: starting from the beginning")
        return None
    return find_checkpoint(args.out).path


def _run_folder(args: argparse.Namespace, strategy: str, resume: Path | None) -> Path:
    """Return the folder of the run. Raises `UsageError` if it has a different run."""
    if resume is not None and resume.parent.name == "checkpoints":
        run_folder = resume.parent.parent
        if args.out is None or args.out.resolve() == run_folder.resolve():
            return run_folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    workload_and_strategy = "-".join(Path(path.partition(":")[0]).stem for path in (args.workload, strategy))
    name = f"{workload_and_strategy}-{stamp}-{os.getpid()}"
    out = args.out or Path("runs") / name
    # a run that died before its first checkpoint starts again; a finished run is not overwritten
    starts_again = args.resume is _NEWEST and not checkpoints_of(out) and not (out / "record.json").exists()
    if (out / "log.jsonl").exists() and not starts_again:
        raise UsageError(
            f"--out {out}: the folder has a run already; add --resume to resume it, or give another folder"
        )
    return out


def _has_trained(out: Path) -> bool:
    """Whether a folder has a checkpoint or a log line."""
    log = out / "log.jsonl"
    return bool(checkpoints_of(out)) or (log.exists() and log.stat().st_size > 0)


def _describe_checkpoints(out: Path) -> str:
    """Describe the checkpoints of a finished run."""
    checkpoints = checkpoints_of(out)
    return (
        f"; {len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}, the newest {checkpoints[-1].path.name}"
        if checkpoints
        else ""
    )
