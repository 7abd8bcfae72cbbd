"""Arguments that several commands share, and functions that print and write results."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from everyrank.commands.arguments import add_options, options_of
from everyrank.commands.launching import add_launching
from everyrank.errors import CHECK_FAILED, CannotRunError, UnsupportedLayoutError, UsageError, printable
from everyrank.launch import starts_no_ranks
from everyrank.layout import STRATEGIES, Layout, parse_layout
from everyrank.record import Record, write_records, write_text
from everyrank.workload import LR_RULES, Source, check_place, parse_settings

__all__ = [
    "add_common",
    "add_layouts",
    "add_options",
    "add_outputs",
    "check_html",
    "check_not_script",
    "check_writable",
    "close_output",
    "layouts_of",
    "options_of",
    "print_diff",
    "printing_results",
    "repeated_arguments",
    "say",
    "say_next",
    "show",
    "source_of",
    "status_of",
]


def add_common(parser: argparse.ArgumentParser, several_sizes: bool = False, records: bool = True) -> None:
    """Add WORKLOAD and the launch flags."""
    parser.add_argument("workload", metavar="WORKLOAD", help="a built-in name, or path/file.py[:name]")
    add_launching(parser, several_sizes)
    parser.add_argument(
        "--workers", type=int, default=0, metavar="W", help="data loader processes of each rank (default 0)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of the data, if the workload does not include it"
    )
    parser.add_argument("--download", action="store_true", help="download it into --data DIR first (mnist, cifar)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="settings of the workload")
    parser.add_argument("--batch", type=int, metavar="N", help="global batch, instead of the workload's")
    parser.add_argument(
        "--lr-rule",
        choices=LR_RULES,
        default="none",
        help="how the learning rate follows --batch (default: none)",
    )
    if records:
        parser.add_argument("--json", type=Path, metavar="F", help="write Records")


def add_layouts(parser: argparse.ArgumentParser) -> None:
    """Add --layout, which can be repeated and takes one or several values."""
    parser.add_argument(
        "--layout",
        nargs="+",
        action="extend",
        metavar="L",
        help=f"one or more, or a function: FILE.py[:function][:axis=N] (default: {' '.join(STRATEGIES)})",
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add --html and --markdown."""
    parser.add_argument("--html", type=Path, metavar="F", help="write a self-contained page")
    parser.add_argument("--markdown", type=Path, metavar="F", help="write a Markdown table")


def source_of(args: argparse.Namespace) -> Source:
    """Return the requested workload with its settings, `--data` among them. Raises `UsageError`."""
    check_place(args.workload)
    settings = parse_settings(args.set)
    if args.data is not None:
        settings["data"] = str(args.data.absolute())
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if args.download and local_rank == "0":  # the other ranks of this host wait for the download
        from everyrank.datasets.download import download

        download(args.workload, args.data)
    return Source(args.workload, settings, args.batch, args.lr_rule)


def layouts_of(args: argparse.Namespace) -> list[Layout]:
    """Return the requested layouts, or all."""
    return [parse_layout(text) for text in args.layout or STRATEGIES]


def show(sets: Mapping[str, list[Record]], args: argparse.Namespace, lines: Sequence[str] = ()) -> None:
    """Write the requested files, then print the tables, so that a closed pipe loses no result.

    `sets` has the Records of each file; several are shown next to each other.
    """
    from everyrank.report import beside_notes, beside_table, groups, markdown, notes, print_table, tables, title

    titled_tables: list[tuple[str, Any, list[str]]] = []
    comparison = beside_table(sets) if len(sets) > 1 else None
    if comparison is not None:
        titled_tables.append((" and ".join(sets), comparison, beside_notes(sets)))
    for rows in [rows for records in sets.values() for rows in groups(records)]:
        tables_of_rows = tables(rows)
        for index, (heading, table) in enumerate(tables_of_rows):
            is_last = index == len(tables_of_rows) - 1
            titled_tables.append((heading or title(rows[0]), table, [*lines, *notes(rows)] if is_last else []))
    written = [path for path in (args.json, args.markdown, args.html) if path is not None]
    if args.json is not None:
        write_records([record for records in sets.values() for record in records], args.json)
    if args.markdown is not None:
        write_text(args.markdown, "\n".join(markdown(*titled_table) for titled_table in titled_tables))
    if args.html is not None:
        from everyrank.report.page import page

        write_text(args.html, page(sets))
    with printing_results():
        for titled_table in titled_tables:
            print_table(*titled_table)
        for path in written:
            print(f"wrote {printable(str(path))}")


@contextlib.contextmanager
def printing_results() -> Generator[None]:
    """Leave the block if the reader of the pipe has gone, as after `| head`; the command goes on to its exit status."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit in place of BrokenPipeError
        close_output()


def say(text: str) -> None:
    """Print a line about finished work. Ignores errors of the output."""
    try:
        print(text, flush=True)
    except OSError:
        close_output()


def repeated_arguments(args: argparse.Namespace) -> str:
    """Return the workload and the flags that the next command also needs, quoted for a shell.

    These are the flags for data, settings, batch, launcher, device and backend, if they were given.
    """
    arguments = [args.workload]
    arguments += ["--data", str(args.data)] if args.data is not None else []
    arguments += ["--set", *args.set] if args.set else []
    arguments += ["--batch", str(args.batch)] if args.batch is not None else []
    arguments += ["--lr-rule", args.lr_rule] if args.lr_rule != "none" else []
    for flag in ("launcher", "device", "backend"):
        value = getattr(args, flag, None)
        arguments += [f"--{flag}", value] if value is not None else []
    return shlex.join(arguments)


def say_next(*commands: str) -> None:
    """Print the next commands, ready to be pasted; under an external launcher only on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        say(printable(f"next: {'; or '.join(commands)}"))


def close_output() -> None:
    """Redirect further output to /dev/null, because the reader of the pipe has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status_of(records: list[Record], args: argparse.Namespace) -> int:
    """Return 1 if a layout differs; for requested layouts 2 if one is unsupported, 3 if one cannot run; else 0."""
    for record in records:
        if record.parity.status == "different":
            reference = record.parity.reference or "single"
            print(f"everyrank: {printable(f'{record.layout} is not equivalent to {reference}')}", file=sys.stderr)
            return CHECK_FAILED
    for record in records:
        if record.parity.status == "refused":
            print(f"everyrank: {printable(f'{record.layout}: {record.parity.reason}')}", file=sys.stderr)
            return UnsupportedLayoutError.exit_status
    for record in records:
        if record.parity.status == "not_verified" and args.layout:
            line = f"{record.layout}: not verified here: {record.parity.reason}"
            print(f"everyrank: {printable(line)}", file=sys.stderr)
            return CannotRunError.exit_status
    return 0


def check_html(args: argparse.Namespace) -> None:
    """Check in advance that --html can be written. Raises `CannotRunError`, or `UsageError` for its path."""
    check_writable(args.html)
    if args.html is not None:
        from everyrank.report.page import require_libraries

        require_libraries()


def check_writable(path: Path | None) -> None:
    """Check in advance that a file can be written. Raises `UsageError`."""
    if path is None or os.environ.get("RANK", "0") != "0":  # only rank 0 writes
        return
    try:
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not target.parent.is_dir():
            raise UsageError(f"{path}: a link to {target}, whose folder does not exist; give another path")
        new_folders = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening a FIFO would block until it has a reader
            return
        # test with a different name, because another rank may check whether the file exists
        probe = path if path.exists() else path.with_name(f".{path.name}.{os.getpid()}")
        with probe.open("a"):
            pass
        if probe != path:
            probe.unlink(missing_ok=True)
        for folder in new_folders if starts_no_ranks() else ():
            folder.rmdir()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another path") from error


def check_not_script(script: str, paths: Iterable[Path | None]) -> None:
    """Raise `UsageError` if a file to write is the user's script itself."""
    for path in paths:
        if path is not None and os.path.realpath(path) == os.path.realpath(script):
            raise UsageError(f"{path}: this is the script; give another path")


def print_diff(lines: Iterable[str]) -> None:
    """Print a unified diff, in color on a terminal."""
    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        text, color = printable(line.rstrip("\r\n")), {"+": "32", "-": "31", "@": "36"}.get(line[:1], "")
        print(f"\033[{color}m{text}\033[0m" if color and is_colored else text)
