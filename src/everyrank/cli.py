"""The command line. Thin: it reads words, calls `session`, prints what comes back, and returns an exit status.

Exit status: 0 all held; 1 a check failed; 2 the call or the workload is wrong; 3 what was asked for by name cannot run
here; 4 the run failed; 130 and 143 for Ctrl-C and SIGTERM. The last line on the screen is the one to read.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from everyrank.arguments import parser
from everyrank.errors import CHECK_FAILED, INTERRUPTED, TERMINATED, CannotRunError, EveryrankError, UsageError
from everyrank.launch import Launch, facts_from_environment, num_accelerators
from everyrank.layout import STRATEGIES, Layout, parse_layout
from everyrank.record import Record, read_records, write_records
from everyrank.workload import Source, parse_settings

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        commands = {"train": _train, "verify": _verify, "bench": _bench, "report": _report, "new": _new}
        parsed = parser(commands).parse_args(arguments)
        status = parsed.function(parsed)
    except EveryrankError as error:
        if error.log is not None:
            print(f"full traceback: {error.log}", file=sys.stderr)
        print(f"everyrank: {error}", file=sys.stderr)
        status = error.exit_status
    except KeyboardInterrupt:
        print("everyrank: interrupted; all ranks are ended", file=sys.stderr)
        status = INTERRUPTED
    except _TerminatedError:
        print("everyrank: terminated; all ranks are ended", file=sys.stderr)
        status = TERMINATED
    except BrokenPipeError:
        _close_output()  # `everyrank new ddp_torchrun | head`
        status = 0
    if _is_a_rank():
        # Threads that wait for other ranks must not keep this one alive, and one of gloo's that lets go of a tensor
        # while Python says goodbye aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _is_a_rank() -> bool:
    """Whether somebody else's launcher started this process as a rank."""
    try:
        return facts_from_environment(os.environ) is not None
    except UsageError:
        return False


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


def _terminate(*_: object) -> NoReturn:
    raise _TerminatedError


def _launch(args: argparse.Namespace, default_processes: int, logs: Path | None = None) -> Launch:
    """How to start, from the words and from who started this process. Raises `UsageError` where the two disagree."""
    facts = facts_from_environment(os.environ)
    if facts is not None:
        if args.launcher is not None:
            raise UsageError(
                f"--launcher {args.launcher}: {facts.started_by} has already started this rank; leave it out"
            )
        if args.processes not in (None, facts.size):
            raise UsageError(f"--processes {args.processes}: {facts.started_by} started {facts.size}; leave it out")
    processes = facts.size if facts is not None else args.processes
    if processes is None:
        processes = (0 if args.device == "cpu" else num_accelerators()) or default_processes
    return Launch(
        launcher=args.launcher or "spawn",
        processes=processes,
        device=args.device,
        backend=args.backend,
        loader_workers=args.workers,
        timeout_seconds=args.timeout,
        logs=logs,
    )


def _train(args: argparse.Namespace) -> int:
    from everyrank.session import run

    layout = parse_layout(args.layout)
    source = Source(args.workload, parse_settings(args.set))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{Path(args.workload.partition(':')[0]).stem}-{layout.strategy}-{stamp}-{os.getpid()}"
    out = args.out or Path("runs") / name
    one_process = layout.axis is None and args.processes is None
    launch = _launch(args, default_processes=1, logs=out / "ranks")
    if one_process and facts_from_environment(os.environ) is None:
        launch = dataclasses.replace(launch, processes=1)
    layout.mesh(launch.processes)
    if (out / "log.jsonl").exists():
        raise UsageError(f"--out {out}: it holds a run already; give another folder")
    for path in (out / "log.jsonl", out / "record.json", args.json, args.profile):
        _check_writable(path)
    try:
        profile = args.profile.absolute() if args.profile is not None else None
        records = run(source, layout, launch, epochs=args.epochs, steps=args.steps, out=out.absolute(), profile=profile)
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


def _verify(args: argparse.Namespace) -> int:
    from everyrank.session import verify

    layouts, launch = _layouts(args), _launch(args, default_processes=2)
    _check_writable(args.json)
    source = Source(args.workload, parse_settings(args.set))
    records = verify(source, layouts, launch, steps=args.steps, samples=args.samples)
    if not records:
        return 0
    audited = [record for record in records if args.samples and record.parity.status != "not_verified"]
    args.html = args.markdown = None
    _show(records, args, [f"{record.layout}: {record.parity.checks[-1]}" for record in audited])
    return _status(records, args)


def _bench(args: argparse.Namespace) -> int:
    from everyrank.session import bench, bench_scaling

    processes: list[int] = args.processes or []
    if len(processes) > 1 and facts_from_environment(os.environ) is not None:
        raise UsageError(f"--processes {' '.join(map(str, processes))}: the ranks are started already; leave it out")
    args.processes = max(processes, default=None)
    layouts, launch = _layouts(args), _launch(args, default_processes=2)
    for path in (args.json, args.html, args.markdown):
        _check_writable(path)
    _check_html(args)
    source = Source(args.workload, parse_settings(args.set))
    if len(processes) > 1:
        records = bench_scaling(source, layouts, launch, processes, trials=args.trials, steps=args.steps)
    else:
        records = bench(source, layouts, launch, trials=args.trials, steps=args.steps)
    if not records:
        return 0
    _show(records, args)
    return _status(records, args)


def _report(args: argparse.Namespace) -> int:
    for path in (args.html, args.markdown):
        _check_writable(path)
    _check_html(args)
    records = [record for path in args.records for record in read_records(path)]
    if not records:
        raise UsageError(f"{args.records[0]}: it holds no Records")
    args.json = None
    _show(records, args)
    return 0


def _new(args: argparse.Namespace) -> int:
    folder = importlib.resources.files("everyrank.recipes")
    recipes = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    }
    if args.list or args.recipe is None:
        width = max(map(len, recipes))
        for name, text in recipes.items():
            summary = text.lstrip('"').partition("\n")[0].rstrip('"')
            print(f"{name:{width}}  {summary}")
        return 0
    if args.recipe not in recipes:
        raise UsageError(f"recipe {args.recipe!r}: give one of {', '.join(recipes)}")
    if args.path is None:
        print(recipes[args.recipe], end="")
        return 0
    if args.path.exists():
        raise UsageError(f"{args.path}: it exists already; give another path, or remove it")
    _check_writable(args.path)
    args.path.write_text(recipes[args.recipe], encoding="utf-8")
    data = args.path.with_name("digits.csv.gz")
    if not data.exists():
        data.write_bytes((importlib.resources.files("everyrank.workloads") / "digits.csv.gz").read_bytes())
    print(f"wrote {args.path} and {data}")
    return 0


def _layouts(args: argparse.Namespace) -> list[Layout]:
    return [parse_layout(text) for text in args.layout or STRATEGIES]


def _show(records: list[Record], args: argparse.Namespace, lines: Sequence[str] = ()) -> None:
    """Write the files that were asked for, then print the table of each workload: a closed pipe loses no result."""
    from everyrank.report import bench_table, groups, markdown, notes, print_table, verify_table
    from everyrank.report.table import title

    shown: list[tuple[str, Any, list[str]]] = []
    for rows in groups(records):
        is_timed = any(record.throughput_samples_per_second for record in rows)
        shown.append((title(rows[0]), bench_table(rows) if is_timed else verify_table(rows), [*lines, *notes(rows)]))
    written = [path for path in (args.json, args.markdown, args.html) if path is not None]
    if args.json is not None:
        write_records(records, args.json)
    if args.markdown is not None:
        args.markdown.write_text("\n".join(markdown(*parts) for parts in shown), encoding="utf-8")
    if args.html is not None:
        from everyrank.report.page import page

        args.html.write_text(page(records), encoding="utf-8")
    try:
        for parts in shown:
            print_table(*parts)
        for path in written:
            print(f"wrote {path}")
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich exits where its reader has gone
        _close_output()


def _close_output() -> None:
    """Send what is still to come nowhere: whoever read our output has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status(records: list[Record], args: argparse.Namespace) -> int:
    """1 when a layout differs, 3 when one that was asked for by name could not be verified, else 0."""
    for record in records:
        if record.parity.status == "different":
            print(f"everyrank: {record.layout} is not the same training as single", file=sys.stderr)
            return CHECK_FAILED
    for record in records:
        if record.parity.status == "not_verified" and args.layout:
            print(f"everyrank: {record.layout}: not verified here: {record.parity.reason}", file=sys.stderr)
            return CannotRunError.exit_status
    return 0


def _check_html(args: argparse.Namespace) -> None:
    if args.html is not None:
        from everyrank.report.page import require_libraries

        require_libraries()


def _check_writable(path: Path | None) -> None:
    """Find out before the work, not after it. Raises `UsageError`."""
    if path is None or os.environ.get("RANK", "0") != "0":  # rank 0 alone writes
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another place") from error


if __name__ == "__main__":
    sys.exit(main())
