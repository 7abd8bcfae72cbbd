"""everyrank report"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import add_outputs, check_html, check_writable, show
from everyrank.errors import UsageError
from everyrank.record import read_records

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show results that --json wrote"
EXAMPLES = (
    "everyrank report records.json",
    "everyrank report before.json after.json --html report.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RECORDS.json (one or more), --html and --markdown."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS.json")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Show the Records of the files next to each other and write the requested pages; exit status 0."""
    check_writable(args.markdown)
    check_html(args)
    # show only the file name, unless two files have the same name
    names = [path.name for path in args.records]
    names = [str(path) if names.count(path.name) > 1 else path.name for path in args.records]
    sets = {name: read_records(path) for name, path in zip(names, args.records, strict=True)}
    for path, records in zip(args.records, sets.values(), strict=False):
        if not records:
            raise UsageError(f"{path}: the file has no Records")
    from everyrank.report.chaos import is_of_chaos, print_chaos

    all_records = [record for records in sets.values() for record in records]
    if all(map(is_of_chaos, all_records)) and args.html is None and args.markdown is None:
        print_chaos(all_records)
        return 0
    args.json = None
    show(sets, args)
    return 0
