"""everyrank report"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import add_outputs, check_html, check_writable, show
from everyrank.errors import UsageError
from everyrank.record import read_records

HELP = "show Records that --json wrote"


__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS.json")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    for path in (args.html, args.markdown):
        check_writable(path)
    check_html(args)
    records = [record for path in args.records for record in read_records(path)]
    if not records:
        raise UsageError(f"{args.records[0]}: it holds no Records")
    args.json = None
    show(records, args)
    return 0
