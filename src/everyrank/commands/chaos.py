"""everyrank chaos"""

from __future__ import annotations

import argparse

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import (
    add_common,
    add_options,
    check_writable,
    options_of,
    printing_results,
    say,
    source_of,
)
from everyrank.errors import CHECK_FAILED, UsageError
from everyrank.layout import parse_layout
from everyrank.options import ChaosOptions, check_minimums
from everyrank.record import Record, write_records

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "inject faults into a training and check that it recovers"
EXAMPLES = (
    "everyrank chaos digits --layout ddp",
    "everyrank chaos digits --layout ddp fsdp --fault kill-rank full-disk",
)

_TIMEOUT_SECONDS = 30.0  # how long to wait for a rank that hangs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, the launch flags, the layouts, and `ChaosOptions`."""
    add_common(parser)
    parser.set_defaults(timeout=_TIMEOUT_SECONDS)
    parser.add_argument("--layout", nargs="+", action="extend", required=True, metavar="L", help="one or more")
    add_options(parser, ChaosOptions)


def run(args: argparse.Namespace) -> int:
    """Inject each fault under each layout and show the table; 0 if all runs recovered, else 1.

    After Ctrl-C the results so far are shown and written.
    """
    from everyrank.chaos import run_campaign
    from everyrank.report.chaos import chaos_line, has_held, print_chaos

    layouts, launch = [parse_layout(text) for text in args.layout], launch_of(args)
    if launch.nodes > 1:
        fix = "leave --nodes out" if args.nodes is not None else "the allocation has several: --launcher spawn"
        raise UsageError(f"--nodes {launch.nodes}: faults are injected only on this host; {fix}")
    options = options_of(args, ChaosOptions, faults=tuple(args.faults), command=["everyrank", *args.argv])
    check_minimums(options)
    check_writable(args.json)
    records: list[Record] = []

    def on_record(record: Record) -> None:
        records.append(record)
        say(chaos_line(record))

    try:
        run_campaign(source_of(args), layouts, launch, options, on_record)
    finally:
        if records:
            if args.json is not None:
                write_records(records, args.json)
            with printing_results():
                print_chaos(records)
    return 0 if all(map(has_held, records)) else CHECK_FAILED
