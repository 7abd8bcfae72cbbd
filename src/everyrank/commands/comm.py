"""everyrank comm"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from everyrank.collectives.options import ALGORITHM_NAMES, DTYPE_BYTES, REDUCTION_NAMES, CommOptions, parse_sizes
from everyrank.commands.launching import add_launching, launch_of
from everyrank.commands.shared import check_html, check_writable, printing_results
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.launch import Launch, run_ranks
from everyrank.record import write_text

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "time and check the collectives between ranks"
EXAMPLES = (
    "everyrank comm --op all_reduce --processes 2",
    "everyrank comm --backend shm gloo --processes 2 --html comm.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operations to measure, and the launch flags."""
    parser.add_argument(
        "--op", nargs="+", action="extend", default=[], metavar="O", help="operations to time (default: all)"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        action="extend",
        default=[],
        metavar="S",
        help="tensor sizes, such as 64KiB, or a range 4:64MiB, in which each size is 4x the previous (default 4:64MiB)",
    )
    parser.add_argument("--dtype", default="float32", metavar="T", help=f"{', '.join(DTYPE_BYTES)} (default: float32)")
    parser.add_argument("--reduction", default="sum", metavar="R", help=f"{', '.join(REDUCTION_NAMES)} (default: sum)")
    parser.add_argument(
        "--algorithm",
        nargs="+",
        action="extend",
        default=[],
        metavar="A",
        help=f"all_reduce as everyrank implements it, beside that of the backend: {', '.join(ALGORITHM_NAMES)}, or all",
    )
    parser.add_argument("--async", dest="is_async", action="store_true", help="call with async_op=True, then wait")
    parser.add_argument("--group-size", type=int, metavar="K", help="run in groups of K ranks at the same time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.2,
        metavar="S",
        help="seconds for each operation and size, at most 200 calls (default %(default)s)",
    )
    add_launching(parser, several_backends=True)
    parser.set_defaults(timeout=60.0, workers=0, workload="comm")  # a batch job is named after its workload
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write all measurements, with fitted latency and bandwidth"
    )
    parser.add_argument("--html", type=Path, metavar="F", help="write a self-contained page with time over bytes")


def run(args: argparse.Namespace) -> int:
    """Measure the collectives and print the table. Return exit status 1 if a result was wrong."""
    from everyrank.report.comm import comm_json, has_failed, print_comm

    options = CommOptions(
        tuple(args.backend or ()),
        tuple(args.op),
        parse_sizes(args.sizes),
        args.dtype,
        args.reduction,
        tuple(args.algorithm),
        args.is_async,
        args.group_size,
        args.seconds,
    )
    launch = launch_of(args)
    _check_groups(options, launch)
    check_html(args)
    check_writable(args.json)
    results: dict[int, dict[str, Any]] = run_ranks(
        launch, "everyrank.collectives.rank:comm_rank", launch, options, True
    )
    if not results.get(0):
        return 0  # under an external launcher only rank 0 has results
    measured = comm_json(results[0], args.argv)
    _write(measured, args)
    with printing_results():
        print_comm(measured)
        for path in (args.json, args.html):
            if path is not None:
                print(f"wrote {printable(str(path))}")
    return CHECK_FAILED if has_failed(measured) else 0


def _write(measured: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the requested files before anything is printed, so that a closed pipe loses no result."""
    if args.json is not None:
        write_text(args.json, json.dumps(measured, indent=1) + "\n")
    if args.html is not None:
        from everyrank.report.comm_page import comm_page

        write_text(args.html, comm_page(measured))


def _check_groups(options: CommOptions, launch: Launch) -> None:
    if options.group_size is not None and launch.processes % options.group_size:
        raise UsageError(
            f"--group-size {options.group_size}: {launch.processes} ranks cannot be divided into groups of this size; "
            f"give a divisor of {launch.processes}"
        )
