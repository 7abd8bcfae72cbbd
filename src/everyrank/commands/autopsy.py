"""everyrank autopsy"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path

import psutil

from everyrank.commands.shared import say
from everyrank.errors import UsageError
from everyrank.launch.autopsy import FOLDER, hang_autopsy

_STACKS = re.compile(r"/rank\d+\.(stacks|seen)$")

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show why ranks hang: which rank is missing from which collective"
EXAMPLES = ("everyrank autopsy runs/first", "everyrank autopsy 4711")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN_DIR|PID."""
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR|PID",
        help="--out or --logs of ranks on this host, or one of their processes",
    )


def run(args: argparse.Namespace) -> int:
    """Ask the ranks of a run for their state and print which rank waits for which; exit status 0.

    Raises `UsageError` if no rank has left its state.
    """
    path: Path = args.run_dir
    if str(path).isdecimal() and not path.exists():
        say(_autopsy_of_process(int(str(path))))
        return 0
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give the --out folder of a training, or a process number")
    for folder in (path / "ranks" / FOLDER, path / FOLDER, path):
        autopsy = hang_autopsy(folder)
        if autopsy is not None:
            say(autopsy)
            return 0
    raise UsageError(
        f"{path}: no rank has written its state there (ranks/{FOLDER}); give the --out folder of a training"
    )


def _autopsy_of_process(pid: int) -> str:
    """Return the autopsy of the job of a process: a rank, a launcher, or one in between. Raises `UsageError`."""
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error as error:
        raise UsageError(f"{pid}: {type(error).__name__}: there is no such process here, or it is not yours") from None
    for each in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for file in each.open_files():  # each rank keeps its file of stacks open
                autopsy = hang_autopsy(Path(file.path).parent) if _STACKS.search(file.path) else None
                if autopsy is not None:
                    return autopsy
    raise UsageError(
        f"{pid}: neither this process nor its children are ranks that everyrank watches; start the script by everyrank "
        "launch, or by python -m everyrank watch"
    )
