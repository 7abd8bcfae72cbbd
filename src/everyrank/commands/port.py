"""everyrank port"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.commands.port_workload import check_workload_options, run_workload
from everyrank.commands.shared import (
    check_html,
    check_not_script,
    check_writable,
    print_diff,
    printing_results,
)
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.audit import Finding
    from everyrank.port import PortResult

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run", "with_header"]

_MAX_SECONDS = 10_000_000  # four months; a sum with the time of day must stay a valid time

HELP = "turn a script for one device into a DistributedDataParallel script, and check it"
EXAMPLES = (
    "everyrank port train.py --epochs 5",
    "everyrank port --to workload train.py",
    "everyrank port --check train_ddp.py train.py --epochs 5",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those before the script are for everyrank, those after it for the script."""
    parser.set_defaults(starts_ranks=True)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="F",
        help="file of the port (default: SCRIPT_ddp.py, SCRIPT_fsdp.py, ... next to the script)",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="edit the script itself, and keep the original as SCRIPT.py.orig"
    )
    parser.add_argument(
        "--check", type=Path, metavar="PORT.py", help="compare this port with the script, and write nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the diff and the check, write nothing")
    parser.add_argument(
        "--force", action="store_true", help="write the port even if it is not equal, with a warning at its top"
    )
    parser.add_argument(
        "--check-processes",
        default="2,3",
        metavar="N,...",
        help="numbers of ranks that the port is checked on (default %(default)s)",
    )
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for each run (default 300)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the edits, the notes and the comparison")
    parser.add_argument(
        "--with", dest="other", type=Path, metavar="F", help="edit this file, too: one of yours with the training loop"
    )
    parser.add_argument(
        "--to",
        choices=("ddp", "fsdp", "accelerate", "fabric", "workload"),
        default="ddp",
        help="ddp: DistributedDataParallel (default); fsdp: fully_shard over the blocks of the model; "
        "accelerate, fabric: in the idiom of Hugging Face Accelerate or Lightning Fabric; "
        "workload: a file for everyrank train, verify and bench",
    )
    parser.add_argument("--html", type=Path, metavar="F", help="write a page with the script and the port side by side")
    parser.add_argument(
        "--sampler",
        choices=("batches", "torch"),
        default="batches",
        help="batches: split each batch over the ranks (default); torch: DistributedSampler, with another order",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py [ARGS ...]", help="your script and its own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Port a script, or check a port; exit status 1 if the port is not equal, 3 if the script cannot be ported."""
    from everyrank.port import IDIOMS, audit_port, check_ported, port_script
    from everyrank.progress import progress
    from everyrank.rerun import ScriptHost

    command, target, counts = _checked_arguments(args)
    if args.to == "workload":
        return run_workload(args, command, target)
    with progress(9, show=True) as advance:
        if args.check is not None:
            with ScriptHost(command, timeout_seconds=args.limit) as host:
                result = check_ported(host, args.check, counts, advance)
        else:
            result = port_script(command, counts, args.limit, advance, args.sampler, args.other, args.to)
        best = result.best
        findings: list[Finding] = []
        if not best.has_failed and (best.is_equal or args.check is not None):
            advance("auditing the port on 2 ranks")
            findings = audit_port(command, result.files, best, args.limit)
    text, is_right = best.text, best.is_equal and not any(finding.level == "FAIL" for finding in findings)
    if args.check is None and not is_right:
        reason = best.comparisons[-1].difference or next(each.text for each in findings if each.level == "FAIL")
        text = with_header(text, f"# NOT EQUAL to {Path(command[0]).name}: {reason}\n")
    if args.json is not None:
        write_text(args.json, json.dumps(_as_json(result, findings, is_right), indent=1) + "\n")
    if args.html is not None:
        from everyrank.report.port import port_page

        write_text(
            args.html, port_page(result, findings, command, target.name if args.check is None else args.check.name)
        )
    written: list[Path] = []
    if args.check is None and not args.dry_run and (is_right or args.force):
        written = _write_port(args, command, target, text, best.other_text)
    with printing_results():
        if args.check is None:
            _show_edits(result, command, target, text)
        _show_check(result, findings)
        for path in written:
            print(f"wrote {printable(str(path))}")
        if written:
            arguments = shlex.join([str(target), *command[1:]])
            start = IDIOMS[args.to].start if args.to in IDIOMS else "torchrun --nproc-per-node"
            print(f"next: {start} {counts[0]} {printable(arguments)}")
    # --check also fails if the port prints, saves or reads something different
    is_right = is_right and not (args.check is not None and (best.doubts or best.differing_lines or findings))
    return 0 if is_right else CHECK_FAILED


def _write_port(args: argparse.Namespace, command: list[str], target: Path, text: str, other_text: str) -> list[Path]:
    """Write the port, and that of the file of --with; return the paths."""
    if args.in_place:
        Path(f"{command[0]}.orig").write_bytes(Path(command[0]).read_bytes())
    target.write_bytes(text.encode())
    if args.other is None:
        return [target]
    other_target = _other_target(args.other, args.to)
    other_target.write_bytes(other_text.encode())
    return [target, other_target]


def _other_target(other: Path, target: str) -> Path:
    """Return the path for the port of the file of --with, from where the port of the script imports it."""
    return other.with_name(f"{other.stem}_{target}.py")


def with_header(text: str, header: str) -> str:
    """Return the text with a comment as its first line, or after `#!/usr/bin/env python` and an encoding line."""
    lines = text.splitlines(keepends=True)
    num_first_lines = 1 if lines and lines[0].startswith("#!") else 0
    if num_first_lines < len(lines) and re.match(r"#.*coding[:=]", lines[num_first_lines]):
        num_first_lines += 1
    return "".join([*lines[:num_first_lines], header, *lines[num_first_lines:]])


def _checked_arguments(args: argparse.Namespace) -> tuple[list[str], Path, list[int]]:
    """Return the script with its arguments, the path of the port, and the numbers of ranks. Raises `UsageError`."""
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    command = command[1:] if command and Path(command[0]).name in ("python", "python3") else command
    if not command:
        raise UsageError("give a script, as in: everyrank port train.py --epochs 5")
    script = Path(command[0])
    if command[0].startswith("-"):
        raise UsageError(f"{command[0]}: put options of everyrank port before the script; python -m is not supported")
    if not script.is_file():
        similar_names = difflib.get_close_matches(
            script.name, [each.name for each in script.absolute().parent.glob("*.py")], 1
        )
        raise UsageError(
            f"{script}: no such file"
            + (f"; did you mean {script.with_name(similar_names[0])}?" if similar_names else "")
        )
    counts = [int(word) for word in args.check_processes.split(",") if word.strip().isdecimal()]
    if len(counts) != len(args.check_processes.split(",")) or not all(2 <= count <= 16 for count in counts):
        raise UsageError(f"--check-processes {args.check_processes}: give numbers from 2 to 16, such as 2,3")
    if not 0 < args.limit <= _MAX_SECONDS:
        raise UsageError(f"--limit {args.limit:g}: give more than 0 seconds, and at most {_MAX_SECONDS:,}")
    check_not_script(command[0], (args.json, args.html))
    target = _target(args, script)
    _check_library(args)
    check_writable(args.json)
    check_html(args)
    return command, target, counts


def _target(args: argparse.Namespace, script: Path) -> Path:
    """Return the path of the port. Raises `UsageError` if it cannot be written."""
    if args.to == "workload":
        check_workload_options(args, script)
    if args.in_place and args.out is not None:
        raise UsageError("--in-place and -o: give one of them")
    _check_other(args)
    target = script if args.in_place else args.out or script.with_name(f"{script.stem}_{args.to}.py")
    if not args.in_place and target.absolute() == script.absolute():
        raise UsageError(
            f"{target}: that is the script; give --in-place to edit it, which keeps the original as {script.name}.orig"
        )
    if args.in_place and not args.dry_run and Path(f"{script}.orig").exists():
        raise UsageError(f"{script}.orig: it exists already; move it away, because --in-place keeps the original there")
    if args.check is not None:
        if args.in_place or args.out is not None or args.force:
            raise UsageError("--check: no port is written; leave out -o, --in-place and --force")
        if not args.check.is_file():
            raise UsageError(f"{args.check}: no such file; give the port, then the script that it was made of")
    elif not args.dry_run:
        check_writable(target)
        if target.exists() and not args.in_place and not args.force:
            raise UsageError(f"{target}: it exists already; give another path with -o, or --force")
    return target


def _check_library(args: argparse.Namespace) -> None:
    """Raise `UsageError` for a library that is not installed, or an option that its ports do not support."""
    from everyrank.port import IDIOMS, check_installed

    if args.to in IDIOMS and args.sampler == "torch":
        raise UsageError(f"--sampler torch: only with --to ddp or --to fsdp; leave it out with --to {args.to}")
    if args.check is None:
        check_installed(args.to)


def _check_other(args: argparse.Namespace) -> None:
    """Raise `UsageError` if the file of --with cannot be edited, or its port cannot be written."""
    if args.other is None:
        return
    if args.in_place or args.check is not None:
        raise UsageError("--with: leave out --in-place and --check")
    if not args.other.is_file():
        raise UsageError(f"--with {args.other}: no such file")
    if _other_target(args.other, args.to).exists() and not args.force and not args.dry_run:
        raise UsageError(f"{_other_target(args.other, args.to)}: it exists already; move it away, or give --force")


def _show_edits(result: PortResult, command: list[str], target: Path, text: str) -> None:
    """Print the diff and a reason for each edit."""
    from everyrank.report.port import edit_reasons

    best = result.best
    changed = [(result.original, text, Path(command[0]).name, target.name)]
    if result.files.other is not None:
        other = result.files.other
        changed.append(
            (result.files.other_text, best.other_text, other.name, _other_target(other, result.files.target).name)
        )
    for before, after, name, new_name in changed:
        print_diff(difflib.unified_diff(before.splitlines(), after.splitlines(), name, new_name, lineterm=""))
    print("\nedits:")
    for line, reason in edit_reasons(best):
        print(f"  {result.files.place(line)}: {reason}")
    print()


def _show_check(result: PortResult, findings: list[Finding]) -> None:
    """Print the comparison, the findings of the audit, and the notes for the user."""
    from everyrank.audit import short_location
    from everyrank.report.port import check_lines

    best = result.best
    print("checked:" if best.is_equal else "not equal:")
    for line in check_lines(result):
        print(f"  {printable(line)}")
    if best.differing_lines:
        print(f"\nprinted differently by the port ({len(best.differing_lines)} lines; the first are):")
        for original_line, port_line in best.differing_lines[:3]:
            print(f"  - {printable(original_line)}\n  + {printable(port_line)}")
    if best.doubts:
        print("\ndifferent from the original:")
        for line in best.doubts:
            print(f"  {printable(line)}")
    if findings:
        print("\nfound by the audit of the port on 2 ranks, and not in the original:")
        for finding in findings:
            print(f"  {short_location(finding.location)}: {printable(finding.text)}\n    {printable(finding.fix)}")
    if best.notes:
        print("\nleft to you:")
        for line, sentence in best.notes:
            print(f"  {result.files.place(line)}: {sentence}")
    print()


def _as_json(result: PortResult, findings: list[Finding], is_right: bool) -> dict[str, Any]:
    from everyrank.report.port import edit_reasons

    best = result.best
    return {
        "equal": is_right,
        "float64": result.float64,
        "without_dropout": best.without_dropout,
        "loss": best.choice.loss if best.choice is not None else None,
        "evaluation": best.choice.evaluation if best.choice is not None else None,
        "edits": [{"place": result.files.place(line), "reason": reason} for line, reason in edit_reasons(best)],
        "left_to_you": [{"place": result.files.place(line), "sentence": sentence} for line, sentence in best.notes],
        "comparisons": [
            {
                "ranks": each.ranks,
                "updates": each.updates,
                "largest": each.largest,
                "difference": each.difference,
                "printed": each.printed,
            }
            for each in best.comparisons
        ],
        "audit": [finding.as_json() for finding in findings],
        "doubts": best.doubts,
        "text": best.text,
        "other_text": best.other_text,
    }
