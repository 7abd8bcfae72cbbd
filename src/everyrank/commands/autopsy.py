"""everyrank autopsy"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import say
from everyrank.errors import UsageError
from everyrank.launch.autopsy import FOLDER, hang_autopsy

__all__ = ["HELP", "add_arguments", "run"]

HELP = "why a run hangs: which rank never came to which collective, and where it stands"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, the folder of a run."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="--out of a training that runs on this host")


def run(args: argparse.Namespace) -> int:
    """Ask the ranks of a run where they stand, and say in one paragraph who waits for whom; 0.

    Raises `UsageError` where no rank has left its state.
    """
    place: Path = args.run_dir
    if not place.is_dir():
        raise UsageError(f"{place}: no folder is there; give that of a training (--out)")
    for folder in (place / "ranks" / FOLDER, place / FOLDER, place):
        found = hang_autopsy(folder)
        if found is not None:
            say(found)
            return 0
    raise UsageError(f"{place}: no rank has left its state there (ranks/{FOLDER}); give the --out of a training")
