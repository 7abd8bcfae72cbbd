"""everyrank autopsy"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import say
from everyrank.errors import UsageError
from everyrank.launch.autopsy import FOLDER, hang_autopsy

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show why a run hangs: which rank is missing from which collective"
EXAMPLES = ("everyrank autopsy runs/first",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, the folder of a run."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the --out folder of a training that runs on this host"
    )


def run(args: argparse.Namespace) -> int:
    """Ask the ranks of a run for their state and print which rank waits for which; exit status 0.

    Raises `UsageError` if no rank has left its state.
    """
    path: Path = args.run_dir
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give the --out folder of a training")
    for folder in (path / "ranks" / FOLDER, path / FOLDER, path):
        autopsy = hang_autopsy(folder)
        if autopsy is not None:
            say(autopsy)
            return 0
    raise UsageError(
        f"{path}: no rank has written its state there (ranks/{FOLDER}); give the --out folder of a training"
    )
