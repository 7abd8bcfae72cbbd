"""everyrank doctor"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from everyrank.commands.launching import add_launching, launch_of
from everyrank.commands.shared import check_writable, printing_results
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.launch import Launch
from everyrank.layout import parse_layout
from everyrank.record import write_text
from everyrank.workload import Source, check_place, parse_settings

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "list the layouts and backends that this machine can run, and how to get the rest"
EXAMPLES = (
    "everyrank doctor",
    "everyrank doctor text --layout ddp",
    "everyrank doctor --launch --launcher torchrun --processes 2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the workload, --json, --launch and the launch flags."""
    parser.add_argument(
        "checked",  # a command with `workload` starts ranks
        nargs="?",
        metavar="WORKLOAD",
        help="also check whether this workload (a built-in name or path/file.py[:name]) fits into the memory here",
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="settings of the workload")
    parser.add_argument("--layout", nargs="+", action="extend", metavar="L", help="layouts to check it with")
    parser.add_argument(
        "--launch",
        action="store_true",
        help="find out why a launch fails: check launcher variables and the rendezvous, then start the ranks once",
    )
    add_launching(parser)
    parser.set_defaults(timeout=60.0, workers=0)
    parser.add_argument("--json", type=Path, metavar="F", help="write the results")


def run(args: argparse.Namespace) -> int:
    """Check this machine, or with --launch a start of ranks, and print the results; 1 for a problem."""
    from everyrank.doctor import DoctorReport, check_launch, check_memory, paste, run_checks
    from everyrank.progress import progress
    from everyrank.report import print_findings

    # raises UsageError for a timeout that is not a positive number
    Launch(timeout_seconds=args.timeout, processes=1 if args.processes is None else args.processes)
    check_writable(args.json)
    flags = ["launcher", "nodes", "node_rank", "rendezvous", "init_method", "interface", "backend", "dry_run"]
    flags += [] if args.checked is not None else ["device"]
    given_flag = next((flag for flag in flags if getattr(args, flag) not in (None, False)), None)
    if not args.launch and given_flag is not None:
        raise UsageError(f"--{given_flag.replace('_', '-')}: doctor uses it only with --launch; add --launch")
    if args.checked is None and (args.set or args.layout):
        raise UsageError("doctor --set and --layout are for a workload: everyrank doctor WORKLOAD --layout ddp")
    source = _source(args)
    launch = launch_of(args) if args.launch else None
    with progress((3 if launch else 5) + (source is not None), show=True) as advance:
        if launch:
            report = DoctorReport(check_launch(launch, advance, not args.dry_run))
        else:
            report = run_checks(args.timeout, advance)
        if source is not None:
            command = shlex.join([str(args.checked), *(["--set", *args.set] if args.set else [])])
            report.sections["memory"] = check_memory(
                source, command, args.device, args.processes, args.layout or (), advance
            )
    if args.json is not None:
        write_text(args.json, json.dumps(report.as_json(), indent=1) + "\n")
    with printing_results():
        print_findings(report.sections)
        print("\nTo paste into an issue:\n" + paste(report) + "\n", flush=True)
        if not report.problems:
            print("no problem found")
    for problem in report.problems:
        print(f"everyrank: {printable(problem.line)}", file=sys.stderr)
    return CHECK_FAILED if report.problems else 0


def _source(args: argparse.Namespace) -> Source | None:
    """Return the workload to check, or None. Raises `UsageError` for a name that does not exist."""
    if args.checked is None:
        return None
    check_place(args.checked)
    for text in args.layout or ():
        parse_layout(text)
    return Source(args.checked, parse_settings(args.set))
