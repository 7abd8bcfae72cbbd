"""everyrank audit"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.commands.shared import (
    check_html,
    check_not_script,
    check_writable,
    print_diff,
    printing_results,
    say_next,
)
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.audit import Audit, AuditOptions
    from everyrank.relations import ResumeCommand

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

_SHORT_SECONDS = 45.0  # only a shorter audit is compared with one rank by default

HELP = "find silent distributed-training mistakes in your own script"
EXAMPLES = (
    "everyrank audit train.py --epochs 5",
    "everyrank audit --processes 4 --html audit.html train.py",
    "everyrank audit --fix train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those before the script are for everyrank, those after it for the script."""
    parser.set_defaults(starts_ranks=True)
    parser.add_argument("--processes", type=int, metavar="N", help="ranks, as torchrun starts them (default 2)")
    parser.add_argument("--updates", type=int, default=12, metavar="K", help="number of updates to check (default 12)")
    parser.add_argument("--watch", action="store_true", help="run only the cheap checks during a complete run")
    parser.add_argument(
        "--replay", action="store_true", help="repeat the first updates in one process and float64, and compare"
    )
    parser.add_argument(
        "--pretend-cuda",
        action="store_true",
        help="let CUDA calls run on the CPU, even if no line of the script names CUDA",
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the first updates again on one rank with the same batches, and compare (default: if the rules found "
        f"no FAIL within {_SHORT_SECONDS:g} s)",
    )
    parser.add_argument(
        "--resume-with",
        metavar="ARGS",
        help="compare a training in one go with one that is resumed by these arguments, as '--resume out/last.pt'",
    )
    parser.add_argument(
        "--stop-with",
        default="",
        metavar="ARGS",
        help="with --resume-with: arguments that make the script save and end",
    )
    parser.add_argument(
        "--same",
        action="append",
        default=[],
        metavar="ARGS",
        help="compare with other settings that should be the same training, as '--accum 1 --batch 32'",
    )
    parser.add_argument("--only-compare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--save", type=Path, metavar="F", help="keep losses, tensors and printed numbers, for a later --against"
    )
    parser.add_argument("--against", type=Path, metavar="F", help="compare the script with what --save has kept")
    parser.add_argument("--strict", action="store_true", help="exit status 1 also for WARN")
    parser.add_argument(
        "--fix", action="store_true", help="search for edits of the script, check each by another audit, show the diff"
    )
    parser.add_argument(
        "--patch", type=Path, metavar="F", help="with --fix: write the diff, for patch -p0 or git apply"
    )
    parser.add_argument("--shim", type=Path, metavar="DIR", help="folder of modules that replace missing packages")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="end after S seconds without progress (default %(default)s)",
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="S", help="longest time of the script, in seconds (default 900)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the findings")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page with the findings next to the code")
    parser.add_argument("--sarif", type=Path, metavar="F", help="write SARIF, for code scanning and editors")
    parser.add_argument(
        "--format", choices=("text", "github"), default="text", help="github: print annotations of GitHub Actions, too"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, not a script")
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT.py [ARGS ...]",
        help="the script and its arguments, as for Python",
    )


def _end_with_the_terminal() -> None:
    """End the script when its terminal closes, as SIGTERM does; under nohup it continues."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


def _command(args: argparse.Namespace) -> tuple[list[str], int | None]:
    """Return the arguments of Python and the number of processes, without a separator (--) around the script."""
    from everyrank.audit.command_line import ScriptCommand, script_command

    if args.module is not None:
        command = ScriptCommand(["-m", *args.module])
    else:
        command = script_command(args.script[1:] if args.script[:1] == ["--"] else args.script)
    python_args, start = command.python_args, 2 if command.python_args[:1] == ["-m"] else 1
    if python_args[start : start + 1] == ["--"]:
        del python_args[start]
    return python_args, command.processes if args.processes is None else args.processes


def _resume_command(args: argparse.Namespace) -> ResumeCommand | None:
    if args.resume_with is None:
        if args.stop_with:
            raise UsageError("--stop-with needs --resume-with; add --resume-with '--resume FILE'")
        return None
    from everyrank.relations import resume_command

    return resume_command(args.resume_with, args.stop_with)


def _other_settings(args: argparse.Namespace) -> list[list[str]]:
    """Return the arguments of each --same, split as a shell does."""
    arguments: list[list[str]] = []
    for text in args.same:
        try:
            arguments.append(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"--same {text!r}: {error}; close the quote") from error
    return arguments


def _check_outputs(args: argparse.Namespace, python_args: list[str]) -> None:
    """Raise `UsageError` for a file that cannot be written, or that is the script itself."""
    check_html(args)
    for path in (args.json, args.sarif, args.patch):
        check_writable(path)
    if args.patch is not None and not args.fix:
        raise UsageError("--patch: give --fix, too")
    if python_args:
        check_not_script(python_args[0], (args.json, args.html, args.sarif, args.patch))


def run(args: argparse.Namespace) -> int:
    """Audit a script and print the findings; exit status 1 if one of them is an error."""
    from everyrank.audit import AuditOptions, ScriptFailedError, audit_script
    from everyrank.launch.environments import is_rank_0_of_all
    from everyrank.progress import progress

    _end_with_the_terminal()
    resume, same = _resume_command(args), _other_settings(args)
    python_args, processes = _command(args)
    options = AuditOptions(
        processes, args.updates, args.watch, args.timeout, args.limit, args.replay, args.pretend_cuda, args.shim
    )
    if args.save is not None or args.against is not None:
        from everyrank.commands.evidence import compare_script_versions

        return compare_script_versions(args, python_args, options)
    _check_outputs(args, python_args)
    last_shown = -1
    with progress(options.updates, show=is_rank_0_of_all(os.environ)) as advance:

        def on_update(updates: int) -> None:
            nonlocal last_shown
            while last_shown < min(updates, options.updates - 1):
                last_shown += 1
                advance(f"update {last_shown + 1} of {options.updates}" if updates else "starting the script")

        on_update(0)
        try:
            audit, failure = None if args.only_compare else audit_script(python_args, options, on_update), None
        except ScriptFailedError as error:
            audit, failure = error.audit, error
    unpatched = audit
    if failure is None:
        audit = _compared(audit, python_args, options, args)
    audit = _with_other_arguments(audit, options, resume, same)
    if audit is not None:
        _show(audit, args)
    if args.fix and unpatched is not None and audit is not None and failure is None:
        patch = _show_patch(unpatched, options, args.patch)
        if args.json is not None:
            write_text(args.json, json.dumps({**audit.as_json(), "patch": patch}, indent=1) + "\n")
    if failure is not None:
        print("\n".join(f"  {printable(line)}" for line in failure.tail), file=sys.stderr)
        raise failure
    if audit is None:  # only rank 0 reports
        return 0
    is_warned = args.strict and any(finding.level == "WARN" for finding in audit.findings)
    return CHECK_FAILED if audit.has_failed or is_warned else 0


def _compared(
    audit: Audit | None, python_args: list[str], options: AuditOptions, args: argparse.Namespace
) -> Audit | None:
    """Return the audit with the findings of a comparison of the ranks with one rank."""
    if args.only_compare:
        from everyrank.relations import audit_by_relations, why_not_compared

        why_not = why_not_compared(python_args, options, os.environ)
        if why_not:
            raise UsageError(f"--only-compare: {why_not}")
        return audit_by_relations(python_args, options)
    if audit is None:
        return None
    is_wanted = _is_worth_comparing(audit, options) if args.compare is None else args.compare
    if not is_wanted:
        return audit
    from everyrank.relations import why_not_compared, with_comparison

    why_not = why_not_compared(audit.python_args, options, os.environ)
    if why_not:
        reasons = () if args.compare is None else (f"comparison with one rank: {why_not}",)
        return dataclasses.replace(audit, unchecked=(*audit.unchecked, *reasons))
    if sys.stderr.isatty():
        print("comparing with one rank; --no-compare leaves it out ...", file=sys.stderr)
    return with_comparison(audit, options)


def _with_other_arguments(
    audit: Audit | None, options: AuditOptions, resume: ResumeCommand | None, same: list[list[str]]
) -> Audit | None:
    """Return the audit with the findings of --resume-with and --same."""
    if audit is None:
        return None
    if resume is not None:
        from everyrank.relations import with_resume

        audit = with_resume(audit, options, resume)
    for other_arguments in same:
        from everyrank.relations import with_settings

        audit = with_settings(audit, options, other_arguments)
    return audit


def _is_worth_comparing(audit: Audit, options: AuditOptions) -> bool:
    """Whether to compare by default: a quick script that trains, without a FAIL that the comparison cannot refute."""
    is_script = options.shim is None and audit.python_args[0] != "-m"
    is_quick = audit.seconds <= _SHORT_SECONDS and not options.watch
    is_certain = any(finding.level == "FAIL" and not finding.refuted_if_equal_to_one_rank for finding in audit.findings)
    return is_script and is_quick and audit.updates > 0 and not is_certain


def _has_edits(audit: Audit) -> bool:
    """Whether --fix has an edit for one of the findings."""
    from everyrank.repair import is_editable

    return any(is_editable(finding, Path(audit.python_args[0])) for finding in audit.findings)


def _show_patch(audit: Audit, options: AuditOptions, target: Path | None) -> dict[str, Any]:
    """Search for edits that fix the findings, print their diff and reasons, and return them for --json."""
    from everyrank.audit import short_location
    from everyrank.repair import patch_script

    patch = patch_script(audit, options, lambda text: print(f"{text} ...", file=sys.stderr))
    name = os.path.relpath(audit.python_args[0])
    diff = "".join(difflib.unified_diff(patch.original.splitlines(True), patch.text.splitlines(True), name, name))
    if target is not None:
        write_text(target, diff)
    with printing_results():
        print()
        if diff:
            print_diff(diff.splitlines())
            audits = "1 more audit" if patch.audits == 1 else f"{patch.audits} more audits"
            print(f"\nmended ({audits} of the edited script confirmed it):")
        for finding, reasons in patch.mended:
            consequence = "" if reasons else ", which followed from the others"
            print(f"  {finding.rule} at {printable(short_location(finding.location))}{consequence}")
            for line, reason in reasons:
                print(f"    line {line}: {reason}")
        if patch.left:
            print("not patched:")
            for finding, reason in patch.left:
                print(f"  {finding.rule} at {printable(short_location(finding.location))}: {printable(reason)}")
        if not diff and not patch.left:
            print("no finding to mend")
        if target is not None:
            print(f"wrote {printable(str(target))}")
    return {**patch.as_json(), "diff": diff}


def _show(audit: Audit, args: argparse.Namespace) -> None:
    """Write the requested files, then print, so that a closed pipe loses no result."""
    from everyrank.report import audit_page, github_annotations, print_audit, sarif_log

    if args.json is not None:
        write_text(args.json, json.dumps(audit.as_json(), indent=1) + "\n")
    if args.sarif is not None:
        write_text(args.sarif, json.dumps(sarif_log(audit), indent=1) + "\n")
    if args.html is not None:
        write_text(args.html, audit_page(audit))
    with printing_results():
        print_audit(audit)
        for line in github_annotations(audit) if args.format == "github" else ():
            print(line)
        for path in (args.json, args.html, args.sarif):
            if path is not None:
                print(f"wrote {printable(str(path))}")
        if not args.fix and args.format == "text" and _has_edits(audit):
            say_next(shlex.join(["everyrank", "audit", "--fix", *args.argv[1:]]))
