"""everyrank report"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import add_outputs, check_html, check_writable, show
from everyrank.errors import UsageError
from everyrank.record import read_records

__all__ = ["HELP", "add", "run"]

HELP = "show Records that --json wrote"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS.json")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    for path in (args.html, args.markdown):
        check_writable(path)
    check_html(args)
    # a file's own name is enough to tell it from the others, unless two have the same
    names = [path.name for path in args.records]
    names = [str(path) if names.count(path.name) > 1 else path.name for path in args.records]
    sets = {name: read_records(path) for name, path in zip(names, args.records, strict=True)}
    for path, records in zip(args.records, sets.values(), strict=False):
        if not records:
            raise UsageError(f"{path}: it holds no Records")
    args.json = None
    show(sets, args)
    return 0
