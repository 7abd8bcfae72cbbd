"""everyrank verify"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from everyrank.commands.launching import launch_of
from everyrank.commands.oom_advice import advising_on_memory
from everyrank.commands.shared import (
    add_common,
    add_layouts,
    add_options,
    check_writable,
    layouts_of,
    options_of,
    repeated_arguments,
    say_next,
    show,
    source_of,
    status_of,
)
from everyrank.commands.versions import compare_versions
from everyrank.options import VerifyOptions

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "compare layouts with one process, update by update"
EXAMPLES = (
    "everyrank verify digits --layout ddp zero1 fsdp --processes 2",
    "everyrank verify my_workload.py",
    "everyrank verify digits --save before.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, the launch flags, the layouts, and `VerifyOptions`."""
    add_common(parser)
    add_layouts(parser)
    add_options(parser, VerifyOptions)
    group: Any = parser.add_argument_group("versions", "compare the workload with an earlier version of it")
    group.add_argument("--save", type=Path, metavar="F", help="keep losses and tensors of one process in a file")
    group.add_argument("--against", type=Path, metavar="F", help="compare with such a file: code, torch, machine")
    group.add_argument("--between", nargs=2, metavar=("A", "B"), help="compare two commits of git (main HEAD)")


def run(args: argparse.Namespace) -> int:
    """Compare each layout with one device and show the Records; 0 if all are equal, else `status_of`."""
    from everyrank import api

    if args.save or args.against or args.between:
        return compare_versions(args)
    layouts, launch = layouts_of(args), launch_of(args)
    check_writable(args.json)
    source = source_of(args)
    options = options_of(args, VerifyOptions, explicit=bool(args.layout))
    with advising_on_memory():
        records = api.verify(source, layouts, launch, options=options)
    if not records:
        return 0
    checked = [record for record in records if record.parity.checks]
    lines = [f"{record.layout}: {record.parity.checks[-1]}" for record in checked if args.samples]
    if args.quick:
        lines += dict.fromkeys(text for record in checked for text in record.parity.checks if text.startswith("quick:"))
    args.html = args.markdown = None
    show({"": records}, args, lines)
    status = status_of(records, args)
    equal = [record.layout for record in records if record.parity.status == "equal"]
    if status == 0 and equal and not args.samples:
        say_next(
            f"everyrank bench {repeated_arguments(args)} --layout {shlex.join(dict.fromkeys(['single', *equal]))} "
            f"--processes {launch.processes} --html report.html"
        )
    return status
