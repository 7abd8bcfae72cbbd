"""everyrank bench"""

from __future__ import annotations

import argparse
import os
from typing import Any

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import (
    add_common,
    add_layouts,
    add_outputs,
    check_html,
    check_writable,
    layouts_of,
    show,
    source_of,
    status_of,
)
from everyrank.errors import UsageError
from everyrank.launch import facts_from_environment
from everyrank.record import Record

__all__ = ["HELP", "add", "run"]

HELP = "check layouts, then time those that are equal"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    add_common(parser, default_processes=2, several_sizes=True)
    add_layouts(parser)
    parser.add_argument("--trials", type=int, default=5, metavar="T", help="timed runs of each layout (default 5)")
    parser.add_argument("--steps", type=int, metavar="K", help="updates of each run (default: at most 60)")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    from everyrank import api

    processes: list[int] = args.processes or []
    if len(processes) > 1 and facts_from_environment(os.environ) is not None:
        raise UsageError(f"--processes {' '.join(map(str, processes))}: the ranks are started already; leave it out")
    args.processes = max(processes, default=None)
    layouts, launch, by_name = layouts_of(args), launch_of(args), bool(args.layout)
    for path in (args.json, args.html, args.markdown):
        check_writable(path)
    check_html(args)
    source = source_of(args)
    words: dict[str, Any] = {"trials": args.trials, "steps": args.steps, "by_name": by_name}
    kept: list[Record] = []
    try:
        if len(processes) > 1:
            records = api.bench_scaling(source, layouts, launch, processes, **words, kept=kept)
        else:
            records = api.bench(source, layouts, launch, **words, kept=kept)
    except UsageError:
        raise
    except BaseException:  # Ctrl-C, SIGTERM, a rank that died: what is known is shown, and then what it ended by
        if any(record.parity.status != "not_verified" for record in kept):
            show({"": kept}, args)
        raise
    if not records:
        return 0
    show({"": records}, args)
    return status_of(records, args)
