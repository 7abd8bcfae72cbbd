"""everyrank watch"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from everyrank.errors import UsageError
from everyrank.script import read_command

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "run a script that explains why it hangs, as one rank of any launcher"
EXAMPLES = (
    "torchrun --nproc-per-node=2 -m everyrank watch train.py --epochs 5",
    "srun python -m everyrank watch --timeout 120 train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those before the script are for everyrank, those after it for the script."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="after S seconds without progress, print why (default 300)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder for the files of the ranks, shared by all hosts (default: a cache)",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, not a script")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py [ARGS ...]", help="your script and its own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Replace this process by Python that watches and runs the script, so that it ends as the script does."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script and not args.module:
        raise UsageError("no script was given; type everyrank watch train.py, with the script's arguments after it")
    command = read_command(["-m", *args.module] if args.module is not None else script)
    if not args.timeout > 0:
        raise UsageError(f"--timeout {args.timeout:g}: give more than 0 seconds")
    folder = "-" if args.folder is None else str(args.folder)
    python_command = [
        sys.executable,
        "-P",
        "-m",
        "everyrank.script.watching",
        str(args.timeout),
        folder,
        *command.python_args,
    ]
    sys.stdout.flush()
    os.execv(sys.executable, python_command)  # noqa: S606  (no shell)
