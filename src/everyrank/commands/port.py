"""everyrank port"""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.commands.shared import check_writable, print_diff
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.port import Attempt, PortResult

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "turn a script for one device into a DistributedDataParallel script, and check it"
EXAMPLES = (
    "everyrank port train.py --epochs 5",
    "everyrank port -o train_ddp.py --check-processes 2,4 train.py --epochs 5",
    "everyrank port --dry-run train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those before the script are for everyrank, those after it for the script."""
    parser.set_defaults(starts_ranks=True)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="F", help="file of the port (default: SCRIPT_ddp.py next to the script)"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="edit the script itself, and keep the original as SCRIPT.py.orig"
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
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py [ARGS ...]", help="your script and its own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Port a script; exit status 1 if no port was equal to it, 3 if it is not ported."""
    from everyrank.port import port_script
    from everyrank.progress import progress

    words, target, counts = _checked(args)
    with progress(6, show=True) as advance:
        result = port_script(words, counts, args.limit, advance)
    best = result.best
    text = best.text
    if not best.is_equal:
        text = f"# NOT EQUAL to {Path(words[0]).name}: {best.comparisons[-1].difference}\n{text}"
    if args.json is not None:
        write_text(args.json, json.dumps(_as_json(result), indent=1) + "\n")
    _show(result, words, target, text)
    if args.dry_run or not (best.is_equal or args.force):
        return 0 if best.is_equal else CHECK_FAILED
    if args.in_place:
        Path(f"{words[0]}.orig").write_bytes(Path(words[0]).read_bytes())
    target.write_bytes(text.encode())
    print(f"wrote {printable(str(target))}")
    arguments = shlex.join([str(target), *words[1:]])
    print(f"next: torchrun --nproc-per-node {counts[0]} {printable(arguments)}")
    return 0 if best.is_equal else CHECK_FAILED


def _checked(args: argparse.Namespace) -> tuple[list[str], Path, list[int]]:
    """The script with its arguments, the path of the port, and the numbers of ranks. Raises `UsageError`."""
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    words = words[1:] if words and Path(words[0]).name in ("python", "python3") else words
    if not words:
        raise UsageError("give a script, as in: everyrank port train.py --epochs 5")
    script = Path(words[0])
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]}: options of everyrank port stand before the script; python -m is not ported")
    if not script.is_file():
        near = difflib.get_close_matches(script.name, [each.name for each in script.absolute().parent.glob("*.py")], 1)
        raise UsageError(f"{script}: no such file" + (f"; did you mean {script.with_name(near[0])}?" if near else ""))
    counts = [int(word) for word in args.check_processes.split(",") if word.strip().isdigit()]
    if len(counts) != len(args.check_processes.split(",")) or not all(2 <= count <= 16 for count in counts):
        raise UsageError(f"--check-processes {args.check_processes}: give numbers from 2 to 16, such as 2,3")
    if args.in_place and args.out is not None:
        raise UsageError("--in-place and -o: give one of them")
    target = script if args.in_place else args.out or script.with_name(f"{script.stem}_ddp.py")
    if not args.in_place and target.absolute() == script.absolute():
        raise UsageError(
            f"{target}: that is the script; give --in-place to edit it, which keeps the original beside it"
        )
    if args.in_place and not args.dry_run and Path(f"{script}.orig").exists():
        raise UsageError(f"{script}.orig: it exists already; move it away, because the original is kept there")
    if not args.dry_run:
        check_writable(target)
        if target.exists() and not args.in_place and not args.force:
            raise UsageError(f"{target}: it exists already; give another place with -o, or --force")
    check_writable(args.json)
    return words, target, counts


def _show(result: PortResult, words: list[str], target: Path, text: str) -> None:
    """Print the diff, a reason for each edit, the comparison, and what is left to the person."""
    best = result.best
    print_diff(
        difflib.unified_diff(
            result.original.splitlines(), text.splitlines(), Path(words[0]).name, target.name, lineterm=""
        )
    )
    print("\nedits:")
    for line, reason in _reasons(best):
        print(f"  line {line}: {reason}")
    print("\nchecked:" if best.is_equal else "\nnot equal:")
    for line in _checks(result):
        print(f"  {printable(line)}")
    if best.differing_lines:
        print(f"\nprinted otherwise by the port ({len(best.differing_lines)} lines, the first):")
        for one, other in best.differing_lines[:3]:
            print(f"  - {printable(one)}\n  + {printable(other)}")
    if best.notes:
        print("\nleft to you:")
        for line, sentence in best.notes:
            print(f"  line {line}: {sentence}")
    print()


def _reasons(attempt: Attempt) -> list[tuple[int, str]]:
    pairs = [(edit.start[0], edit.reason) for edit in attempt.edits if edit.reason]
    return sorted(dict.fromkeys(pairs))


def _checks(result: PortResult) -> list[str]:
    """One line for each number of ranks."""
    lines: list[str] = []
    precision = "float64" if result.float64 else "float32, because the script does not run in float64"
    for comparison in result.best.comparisons:
        if not comparison.is_equal:
            lines.append(comparison.difference)
            continue
        gaps = ", ".join(f"{kind} {gap:.0e}" for kind, gap in comparison.largest.items())
        dropout = ", all dropout left out" if result.best.without_dropout else ""
        lines.append(
            f"{comparison.updates} updates on {comparison.ranks} ranks equal one process in {precision}{dropout}: "
            f"largest relative difference of {gaps}"
        )
    return lines


def _as_json(result: PortResult) -> dict[str, Any]:
    best = result.best
    return {
        "equal": best.is_equal,
        "float64": result.float64,
        "without_dropout": best.without_dropout,
        "loss": best.choice.loss,
        "evaluation": best.choice.evaluation,
        "edits": [{"line": line, "reason": reason} for line, reason in _reasons(best)],
        "left_to_you": [{"line": line, "sentence": sentence} for line, sentence in best.notes],
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
        "text": best.text,
    }
