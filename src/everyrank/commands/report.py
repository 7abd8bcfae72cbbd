"""everyrank report"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.shared import add_outputs, check_html, check_writable, printing_results, say, show
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import read_records

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show results that --json wrote, or compare two loss curves"
EXAMPLES = (
    "everyrank report records.json",
    "everyrank report before.json after.json --html report.html",
    "everyrank report compare before.csv after.csv --column train_loss",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RECORDS.json (one or more) or `compare A B`, and the options of both."""
    parser.add_argument("files", nargs="+", metavar="RECORDS.json", help="one or more; or: compare A B")
    add_outputs(parser)
    parser.add_argument("--column", metavar="NAME", help="compare: CSV column or TensorBoard tag (default: the loss)")
    parser.add_argument("--precision", metavar="P", help="compare: float64, float32 (default), bf16 or fp16")
    parser.add_argument(
        "--same-seed", action="store_true", help="compare: both runs use the same seed and read the same samples"
    )


def run(args: argparse.Namespace) -> int:
    """Show the Records of the files next to each other and write the requested pages; exit status 0.

    `compare A B`: exit status 0 only if two loss curves differ by no more than rounding or seed noise.
    """
    if args.files[0] == "compare":
        return _compare(args)
    for flag, value in (("--column", args.column), ("--precision", args.precision), ("--same-seed", args.same_seed)):
        if value:
            raise UsageError(f"{flag}: only for everyrank report compare A B")
    args.records = [Path(word) for word in args.files]
    check_writable(args.markdown)
    check_html(args)
    # show only the file name, unless two files have the same name
    names = [path.name for path in args.records]
    names = [str(path) if names.count(path.name) > 1 else path.name for path in args.records]
    sets = {name: read_records(path) for name, path in zip(names, args.records, strict=True)}
    for path, records in zip(args.records, sets.values(), strict=False):
        if not records:
            raise UsageError(f"{path}: the file has no Records")
    from everyrank.report.chaos import is_chaos_record, print_chaos

    all_records = [record for records in sets.values() for record in records]
    if all(map(is_chaos_record, all_records)) and args.html is None and args.markdown is None:
        with printing_results():
            print_chaos(all_records)
        return 0
    args.json = None
    show(sets, args)
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Compare two loss curves, or the curves of several seeds."""
    from everyrank.report.curves import read_curves
    from everyrank.report.two_curves import compare_curves, pairs_of_curves, uncompared_layouts

    if len(args.files) != 3:
        raise UsageError(
            "report compare: give two arguments, A and B: Records, CSV files or TensorBoard folders; for several seeds "
            "give a folder with a file for each"
        )
    if args.html is not None or args.markdown is not None:
        raise UsageError("report compare: leave --html and --markdown out; it prints a few lines")
    curves_before, curves_now = (read_curves(Path(path), args.column) for path in args.files[1:])
    results = {
        label: compare_curves(a, b, args.precision, args.same_seed)
        for label, a, b in pairs_of_curves(curves_before, curves_now)
    }
    uncompared = uncompared_layouts(curves_before, curves_now)
    for label, result in results.items():
        for line in [label, *result.lines()] if len(results) > 1 or uncompared else result.lines():
            say(printable(line))
    if uncompared:
        say(printable(f"not compared: {', '.join(uncompared)}"))
    is_same = all(result.status not in ("different", "undecided") for result in results.values())
    return 0 if is_same else CHECK_FAILED
