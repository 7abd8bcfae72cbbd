"""everyrank eject"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from everyrank.errors import UsageError, printable
from everyrank.layout import parse_layout
from everyrank.workload import Source, check_place, parse_settings

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "export a workload and a layout as a project in plain PyTorch"
EXAMPLES = (
    "everyrank eject digits my_project --layout fsdp",
    "everyrank eject my_workload.py my_project --layout ddp --launcher slurm --processes 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, DIR, the layout, the launcher, and the settings of the workload."""
    parser.add_argument("workload_name", metavar="WORKLOAD", help="a built-in name, or path/file.py[:name]")
    parser.add_argument("folder", type=Path, metavar="DIR", help="an empty or new folder")
    parser.add_argument(
        "--layout",
        default="ddp",
        metavar="L",
        help="ddp (default), zero1, fsdp, tensor, pipeline, horovod, dataparallel",
    )
    parser.add_argument("--launcher", metavar="X", help="torchrun (default), spawn, slurm, mpi")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="ranks of a host (default 2)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of the data, if the workload does not include it"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="settings of the workload")
    parser.add_argument("--batch", type=int, metavar="N", help="global batch, instead of the workload's")
    parser.add_argument("--epochs", type=int, metavar="E", help="number of epochs, instead of the workload's")
    parser.add_argument("--steps", type=int, metavar="K", help="total number of updates, instead of the workload's")


def run(args: argparse.Namespace) -> int:
    """Write the project and print its files; exit status 0."""
    check_place(args.workload_name)
    if args.processes < 1:
        raise UsageError(f"--processes {args.processes}: give at least 1")
    layout = parse_layout(args.layout)
    settings = parse_settings(args.set)
    if args.data is not None:
        settings["data"] = str(args.data.absolute())
    source = Source(args.workload_name, settings, batch=args.batch, epochs=args.epochs, steps=args.steps)
    from everyrank import eject

    command = shlex.join(["everyrank", *args.argv])
    request = eject.EjectRequest(source, layout, args.launcher or eject.launcher_of(layout), args.processes, command)
    written = eject.write_project(request, args.folder)
    names = printable(f"{', '.join(path.name for path in written)} in {args.folder}")
    print(f"wrote {names}; README.md shows how to start it")
    return 0
