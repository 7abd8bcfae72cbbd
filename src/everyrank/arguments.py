"""The words of the command line: which commands and options there are. What they do is in `cli`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from everyrank import __version__
from everyrank.errors import UsageError
from everyrank.launch import LAUNCHERS
from everyrank.layout import STRATEGIES
from everyrank.workload import BUILT_IN

__all__ = ["parser"]


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser(functions: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The parser; the function of the command that was given ends up in its `function`."""
    top = _Parser(
        prog="everyrank",
        description="PyTorch distributed training that checks its own numbers.",
        epilog=f"Workloads: {', '.join(BUILT_IN)}, or a file. Layouts: {', '.join(STRATEGIES)}, with [:key=value,...].",
    )
    top.add_argument("--version", action="version", version=f"everyrank {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    train = commands.add_parser("train", help="train a workload under a layout")
    _add_common(train)
    train.add_argument("--layout", default="single", metavar="L", help="default: single")
    train.add_argument("--epochs", type=int, metavar="E", help="instead of the workload's own length")
    train.add_argument("--steps", type=int, metavar="K", help="updates, instead of the workload's own length")
    train.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for log.jsonl, record.json and the ranks' logs; default: runs/...",
    )
    train.add_argument("--profile", type=Path, metavar="F", help="write a trace of one step of all ranks (Perfetto)")
    train.set_defaults(function=functions["train"])

    verify = commands.add_parser("verify", help="check that layouts equal one device")
    _add_common(verify)
    _add_layouts(verify)
    verify.add_argument("--steps", type=int, default=20, metavar="K", help="updates to compare (default 20)")
    verify.add_argument("--samples", action="store_true", help="audit that each sample is read once and evaluated once")
    verify.set_defaults(function=functions["verify"])

    bench = commands.add_parser("bench", help="check layouts, then time those that are equal")
    _add_common(bench, several=True)
    _add_layouts(bench)
    bench.add_argument("--trials", type=int, default=5, metavar="T", help="timed runs of each layout (default 5)")
    bench.add_argument("--steps", type=int, metavar="K", help="updates of each run (default: at most 60)")
    _add_outputs(bench)
    bench.set_defaults(function=functions["bench"])

    report = commands.add_parser("report", help="show Records that --json wrote")
    report.add_argument("records", nargs="+", type=Path, metavar="RECORDS.json")
    _add_outputs(report)
    report.set_defaults(function=functions["report"])

    new = commands.add_parser("new", help="print or write a standalone script: plain PyTorch, yours")
    new.add_argument("recipe", nargs="?", metavar="RECIPE")
    new.add_argument("path", nargs="?", type=Path, metavar="PATH", help="write it there, with its data beside it")
    new.add_argument("--list", action="store_true", help="what there is")
    new.set_defaults(function=functions["new"])
    return top


def _add_common(parser: argparse.ArgumentParser, several: bool = False) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help="a built-in name, or path/file.py[:name]")
    ranks = "ranks in all; default: the visible accelerators"
    if several:
        parser.add_argument(
            "--processes", type=int, nargs="+", metavar="N", help=f"{ranks}. Several (1 2 4): how each layout scales"
        )
    else:
        parser.add_argument("--processes", type=int, metavar="N", help=ranks)
    parser.add_argument("--launcher", metavar="X", help=f"{' or '.join(LAUNCHERS)} (default: spawn)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--backend", metavar="B", help="gloo or nccl; default: nccl with a CUDA device for each rank")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="W", help="data loader processes of each rank (default 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for another rank, in seconds"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="settings of the workload")
    parser.add_argument("--json", type=Path, metavar="F", help="write Records")


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layout",
        nargs="+",
        action="extend",
        metavar="L",
        help=f"one or more; default: {' '.join(STRATEGIES)}",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="F", help="write a self-contained page")
    parser.add_argument("--markdown", type=Path, metavar="F", help="write a Markdown table")
