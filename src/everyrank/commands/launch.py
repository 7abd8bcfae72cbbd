"""everyrank launch"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from everyrank.commands.launching import add_launching, dry_run_or_submit, launch_of
from everyrank.errors import EveryrankError, UsageError, printable
from everyrank.launch import rank_info_from_environment
from everyrank.launch.launcher import DEFAULT_LAUNCHER, launcher_named
from everyrank.options import arguments_of
from everyrank.script import ScriptOptions, launch_script, read_command

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "start your own script on several ranks, under any launcher"
EXAMPLES = (
    "everyrank launch --processes 4 train.py --epochs 5",
    "everyrank launch --launcher torchrun --restarts 3 --logs logs -m pkg.train",
    "everyrank launch --dry-run --processes 8 --launcher slurm train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those before the script are for everyrank, those after it for the script."""
    add_launching(parser, for_scripts=True)
    parser.set_defaults(workers=0)
    parser.add_argument(
        "--start-timeout", type=float, default=300.0, metavar="S", help="longest wait for ranks to start (default 300)"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="output of each rank (default: a temporary folder, kept after a failure)",
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="time for ranks to end after a signal (default 30)"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, not a script")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py [ARGS ...]", help="your script and its own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Start the script on all ranks; exit status 0, 4 if a rank failed, 128 + N after signal N."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    args.command = read_command(["-m", *args.module] if args.module is not None else script)
    if not args.grace >= 0:  # also refuses nan
        raise UsageError(f"--grace {args.grace:g}: give 0 or more seconds")
    restarts = _take_restarts(args)
    status = dry_run_or_submit(args)
    if status is not None:
        return status
    options = ScriptOptions(restarts, args.grace)
    is_rank = rank_info_from_environment(os.environ) is not None
    logs, is_temporary = args.logs, args.logs is None and not is_rank
    launch = launch_of(args, logs=logs)
    if is_temporary:  # only now, because launch_of may refuse the arguments
        logs = Path(tempfile.mkdtemp(prefix="everyrank-logs-"))
        launch = dataclasses.replace(launch, logs=logs)
    if logs is not None and launch.processes > 1 and not is_rank:
        note = ", removed if all ranks end well" if is_temporary else ""
        print(
            f"everyrank: {launch.processes} ranks; output of all but rank 0: {printable(str(logs))}/rank*.log{note}",
            file=sys.stderr,
            flush=True,
        )
    keep_logs = not is_temporary
    try:
        return launch_script(launch, args.command, options)
    except EveryrankError:
        keep_logs = True
        raise
    finally:
        if not keep_logs and logs is not None:
            import shutil

            shutil.rmtree(logs, ignore_errors=True)


def _take_restarts(args: argparse.Namespace) -> int:
    """Move --restarts out of `args` and return it, if the launcher has no restarts and everyrank does them."""
    launcher = launcher_named(args.launcher or DEFAULT_LAUNCHER)
    if not args.restarts or "restarts" in arguments_of(launcher.options):
        return 0
    if args.restarts < 0:
        raise UsageError(f"--restarts {args.restarts}: give 0 or more")
    if launcher.launch_per_node and args.nodes not in (None, "1"):
        raise UsageError(
            f"--restarts {args.restarts}: not supported on several hosts by --launcher {launcher.name}; add --launcher "
            "torchrun, or leave --restarts out"
        )
    restarts, args.restarts = args.restarts, 0
    return restarts
