"""everyrank bench"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from everyrank.commands.launching import launch_of
from everyrank.commands.oom_advice import advising_on_memory
from everyrank.commands.shared import (
    add_common,
    add_layouts,
    add_options,
    add_outputs,
    check_html,
    check_writable,
    layouts_of,
    options_of,
    repeated_arguments,
    say_next,
    show,
    source_of,
    status_of,
)
from everyrank.errors import UsageError
from everyrank.launch import rank_info_from_environment
from everyrank.layout import parse_layout
from everyrank.options import BenchOptions
from everyrank.record import Record

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "verify layouts, then time those that are equivalent"
EXAMPLES = (
    "everyrank bench digits --layout single ddp fsdp --processes 2 --html report.html",
    "everyrank bench my_workload.py --json records.json",
    "everyrank bench imagenet --data DIR --preset ancestors --processes 4",
)

_PRESETS = {
    "ancestors": (
        "single",
        "dataparallel:batch_norm=local",
        "ddp:batch_norm=local",
        "ddp:batch_norm=local,precision=fp16",
        "horovod:batch_norm=local",
    )
}
"""Name -> layouts. ancestors: the methods of the repositories in docs/coming-from/pytorch-distributed*.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, the launch flags, the layouts, `BenchOptions`, and the output files."""
    add_common(parser, several_sizes=True)
    add_layouts(parser)
    parser.add_argument(
        "--preset",
        choices=tuple(_PRESETS),
        help="layouts by name, instead of --layout. ancestors: DataParallel, DistributedDataParallel, mixed precision "
        "and Horovod, each with batch norm of its own device",
    )
    add_options(parser, BenchOptions)
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Check each layout, time the equal ones and show the Records; returns 0 if all are equal, else `status_of`.

    With several values of `--processes` this runs for each. After Ctrl-C the results so far are shown.
    """
    from everyrank import api

    processes: list[int] = args.processes or []
    if len(processes) > 1 and rank_info_from_environment(os.environ) is not None:
        raise UsageError(
            f"--processes {' '.join(map(str, processes))}: the ranks have already been started; leave it out"
        )
    args.processes = max(processes, default=None)
    if args.preset is not None and args.layout:
        raise UsageError(f"--preset {args.preset} --layout {args.layout[0]}: give one of them")
    layouts = [parse_layout(text) for text in _PRESETS[args.preset]] if args.preset else layouts_of(args)
    launch = launch_of(args)
    for path in (args.json, args.markdown):
        check_writable(path)
    check_html(args)
    source = source_of(args)
    options = options_of(args, BenchOptions, explicit=bool(args.layout))
    finished: list[Record] = []
    try:
        with advising_on_memory():
            if len(processes) > 1:
                records = api.bench_scaling(source, layouts, launch, processes, options=options, kept=finished)
            else:
                records = api.bench(source, layouts, launch, options=options, kept=finished)
    except UsageError:
        raise
    except BaseException:  # Ctrl-C, SIGTERM or a dead rank: show the results so far, then re-raise
        if any(record.parity.status != "not_verified" for record in finished):
            show({"": finished}, args)
        raise
    if not records:
        return 0
    show({"": records}, args)
    status = status_of(records, args)
    if status == 0:
        _say_next(records, args)
    return status


def _say_next(records: Sequence[Record], args: argparse.Namespace) -> None:
    """Print the command to train with the fastest of the equal layouts."""
    timed = [(record.throughput_samples_per_second, record) for record in records if record.parity.status == "equal"]
    rates = {record.layout: (rate.median, record.world_size) for rate, record in timed if rate is not None}
    if rates:
        fastest = max(rates, key=lambda layout: rates[layout])
        count = rates[fastest][1]
        say_next(f"everyrank train {repeated_arguments(args)} --layout {shlex.quote(fastest)} --processes {count}")
