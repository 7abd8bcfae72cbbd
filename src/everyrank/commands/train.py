"""everyrank train"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import time
from pathlib import Path

from everyrank.commands.shared import add_common, check_writable, launch_of, source_of
from everyrank.errors import UsageError
from everyrank.launch import facts_from_environment
from everyrank.layout import parse_layout
from everyrank.record import write_records

__all__ = ["HELP", "add", "run"]

HELP = "train a workload under a layout"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    add_common(parser)
    parser.add_argument("--layout", default="single", metavar="L", help="default: single")
    parser.add_argument("--epochs", type=int, metavar="E", help="instead of the workload's own length")
    parser.add_argument("--steps", type=int, metavar="K", help="updates, instead of the workload's own length")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for log.jsonl, record.json and the ranks' logs; default: runs/...",
    )
    parser.add_argument("--profile", type=Path, metavar="F", help="write a trace of one step of all ranks (Perfetto)")


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    from everyrank import session

    layout = parse_layout(args.layout)
    source = source_of(args)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{Path(args.workload.partition(':')[0]).stem}-{layout.strategy}-{stamp}-{os.getpid()}"
    out = args.out or Path("runs") / name
    one_process = layout.axis is None and args.processes is None
    launch = launch_of(args, default_processes=1, logs=out / "ranks")
    if one_process and facts_from_environment(os.environ) is None:
        launch = dataclasses.replace(launch, processes=1)
    layout.mesh(launch.processes)
    if (out / "log.jsonl").exists():
        raise UsageError(f"--out {out}: it holds a run already; give another folder")
    for path in (out / "log.jsonl", out / "record.json", args.json, args.profile):
        check_writable(path)
    try:
        profile = args.profile.absolute() if args.profile is not None else None
        records = session.run(
            source, layout, launch, epochs=args.epochs, steps=args.steps, out=out.absolute(), profile=profile
        )
    except UsageError as error:
        if args.out is None and error.log is None:
            shutil.rmtree(out, ignore_errors=True)  # nothing was trained, and nobody asked for this folder
        raise
    if records:
        write_records(records, out / "record.json")
        if args.json is not None:
            write_records(records, args.json)
        print(f"wrote {out}/log.jsonl and record.json")
        if args.profile is not None:
            print(f"wrote {args.profile}: one step of all ranks; open it at ui.perfetto.dev or chrome://tracing")
    return 0
