"""everyrank verify"""

from __future__ import annotations

import argparse

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import (
    add_common,
    add_layouts,
    check_writable,
    layouts_of,
    show,
    source_of,
    status_of,
)

__all__ = ["HELP", "add", "run"]

HELP = "check that layouts equal one device"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    add_common(parser, default_processes=2)
    add_layouts(parser)
    parser.add_argument("--steps", type=int, default=20, metavar="K", help="updates to compare (default 20)")
    parser.add_argument("--quick", action="store_true", help="float64 alone, six updates; says what it leaves out")
    parser.add_argument("--fresh", action="store_true", help="run single anew, not as an earlier call has kept it")
    parser.add_argument("--samples", action="store_true", help="audit that each sample is read once and evaluated once")


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    from everyrank import api

    layouts, launch = layouts_of(args), launch_of(args)
    check_writable(args.json)
    source = source_of(args)
    records = api.verify(
        source,
        layouts,
        launch,
        steps=args.steps,
        samples=args.samples,
        by_name=bool(args.layout),
        quick=args.quick,
        fresh=args.fresh,
    )
    if not records:
        return 0
    compared = [record for record in records if record.parity.checks]  # compared, or audited at least
    lines = [f"{record.layout}: {record.parity.checks[-1]}" for record in compared if args.samples]
    if args.quick:
        lines += dict.fromkeys(
            text for record in compared for text in record.parity.checks if text.startswith("quick:")
        )
    args.html = args.markdown = None
    show({"": records}, args, lines)
    return status_of(records, args)
