"""everyrank train"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import add_common, check_writable, say, source_of
from everyrank.errors import StoppedError, UsageError
from everyrank.launch import slurm
from everyrank.layout import parse_layout
from everyrank.record import write_records
from everyrank.runs import checkpoints_of, find_checkpoint

__all__ = ["HELP", "add", "run"]

HELP = "train a workload under a layout"

_NEWEST = object()  # --resume without a place: the newest checkpoint in --out; no path is equal to it


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    add_common(parser, default_processes=1)
    parser.add_argument("--layout", default="single", metavar="L", help="default: single")
    parser.add_argument("--epochs", type=int, metavar="E", help="instead of the workload's own length")
    parser.add_argument("--steps", type=int, metavar="K", help="updates in all, instead of the workload's own length")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for logs (log.jsonl, log.csv, events.jsonl, epochs.csv), checkpoints and record.json; default: runs/...",
    )
    parser.add_argument(
        "--resume",
        type=_place,
        nargs="?",
        const=_NEWEST,
        metavar="DIR",
        help="go on from a run's newest checkpoint, or from a checkpoint, under any layout; without DIR: from --out, "
        "or begin where that holds none",
    )
    parser.add_argument("--pretrained", type=Path, metavar="F", help="begin from weights: safetensors or a state dict")
    parser.add_argument(
        "--evaluate", action="store_true", help="evaluate what --resume or --pretrained gives, and do not train"
    )
    every = "updates between two {}; default: an epoch; 0: {}"
    parser.add_argument("--evaluate-every", type=int, metavar="K", help=every.format("evaluations", "at the end alone"))
    parser.add_argument("--save-every", type=int, metavar="K", help=every.format("checkpoints", "none"))
    parser.add_argument("--save-async", action="store_true", help="write checkpoints while the training goes on")
    parser.add_argument("--keep", type=int, default=3, metavar="K", help="the last K checkpoints stay (default 3)")
    parser.add_argument(
        "--best",
        metavar="METRIC",
        help="which metric says the best, which stays too (NAME, NAME:min or NAME:max); default: the workload's first",
    )
    parser.add_argument(
        "--tracker", nargs="+", action="extend", default=[], metavar="T", help="also log to tensorboard, wandb"
    )
    parser.add_argument("--profile", type=Path, metavar="F", help="write a trace of one step of all ranks (Perfetto)")


def _place(text: str) -> Path:
    """A folder; "" is what is left of a variable that is not set, and would be the current one."""
    if not text:
        raise argparse.ArgumentTypeError('"" is no folder; give --resume DIR, or --resume alone with --out DIR')
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    from everyrank import api

    layout = parse_layout(args.layout)
    if args.resume is not None and args.pretrained is not None:
        raise UsageError("--resume and --pretrained: a checkpoint has weights of its own; give one of the two")
    resume = _resumed(args)
    if args.evaluate and resume is None and args.pretrained is None:
        raise UsageError(
            "--evaluate needs what was trained: --resume DIR (a run or a checkpoint), or --pretrained FILE"
        )
    out = None if args.evaluate else _folder(args, layout.strategy, resume)
    launch = launch_of(args, logs=out / "ranks" if out is not None else None, layout=layout)
    layout.mesh(launch.processes)
    source = source_of(args)
    files = [out / "log.jsonl", out / "record.json"] if out is not None else []
    for path in (*files, args.json, args.profile):
        check_writable(path)
    try:
        records = api.run(
            source,
            layout,
            launch,
            epochs=args.epochs,
            steps=args.steps,
            out=out,
            profile=args.profile.absolute() if args.profile is not None else None,
            resume=resume,
            pretrained=args.pretrained,
            evaluate=args.evaluate,
            evaluate_every=args.evaluate_every,
            save_every=args.save_every,
            keep=args.keep,
            best_by=args.best,
            save_async=args.save_async,
            trackers=args.tracker,
        )
    except StoppedError as error:
        job = os.environ.get("SLURM_JOB_ID")
        is_time_up = error.exit_status == 128 + signal.SIGUSR1  # a SIGTERM may be scancel's
        if args.requeue and job is not None and is_time_up:
            print(f"{error}; job {job} waits in the queue again", flush=True)  # Slurm ends what is left of it
            slurm.requeue(job)
        raise
    except UsageError as error:
        if args.out is None and resume is None and out is not None and error.log is None and not _has_trained(out):
            shutil.rmtree(out, ignore_errors=True)  # nobody asked for this folder
        raise
    if records:
        if out is not None:
            (out / "record.json").unlink(missing_ok=True)  # it may be a link to a file outside
            write_records(records, out / "record.json")
            say(f"wrote {out}/log.jsonl, log.csv, events.jsonl, epochs.csv and record.json{_saved(out)}")
        if args.json is not None:
            write_records(records, args.json)
        if args.profile is not None and not args.evaluate:
            say(f"wrote {args.profile}: one step of all ranks; open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _resumed(args: argparse.Namespace) -> Path | None:
    """The checkpoint to go on from; None where the training begins."""
    if args.resume is None:
        return None
    if args.resume is not _NEWEST:
        return find_checkpoint(args.resume).path
    if args.out is None:
        raise UsageError("--resume: from where? give --resume DIR (a run or a checkpoint), or --out DIR of that run")
    if not args.evaluate and not checkpoints_of(args.out):
        if (args.out / "checkpoints").is_dir() and any((args.out / "checkpoints").glob("step-*[0-9]")):
            find_checkpoint(args.out)  # says what is wrong with what is there
        if os.environ.get("RANK", "0") == "0":
            say(f"nothing to go on from in {args.out}: beginning")
        return None
    return find_checkpoint(args.out).path


def _folder(args: argparse.Namespace, strategy: str, resume: Path | None) -> Path:
    """The folder of the run. Raises `UsageError` for one that holds another run."""
    if resume is not None and resume.parent.name == "checkpoints":
        run = resume.parent.parent
        if args.out is None or args.out.resolve() == run.resolve():
            return run
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{Path(args.workload.partition(':')[0]).stem}-{strategy}-{stamp}-{os.getpid()}"
    out = args.out or Path("runs") / name
    # a run that died before its first checkpoint begins again; one that came to its end is not overwritten
    begins_again = args.resume is _NEWEST and not checkpoints_of(out) and not (out / "record.json").exists()
    if (out / "log.jsonl").exists() and not begins_again:
        raise UsageError(f"--out {out}: it holds a run already; go on with --resume, or give another folder")
    return out


def _has_trained(out: Path) -> bool:
    log = out / "log.jsonl"
    return bool(checkpoints_of(out)) or (log.exists() and log.stat().st_size > 0)


def _saved(out: Path) -> str:
    there = checkpoints_of(out)
    return f"; {len(there)} checkpoint{'s' * (len(there) > 1)}, the newest {there[-1].path.name}" if there else ""
