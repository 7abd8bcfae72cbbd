"""everyrank port --to workload"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.commands.shared import printing_results
from everyrank.errors import CHECK_FAILED, EveryrankError, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.port import WorkloadResult

__all__ = ["check_workload_options", "run_workload", "verify_file"]


def run_workload(args: argparse.Namespace, command: list[str], target: Path) -> int:
    """Write the training of a script as a workload; exit status 1 if it is not equal, 3 if it is not ported."""
    from everyrank.port import port_to_workload
    from everyrank.progress import progress

    with progress(7, show=True) as advance:
        result = port_to_workload(command, target, args.limit, verify_file, advance)
    script, text = Path(command[0]).name, result.text
    if not result.is_equal:
        text = f"# NOT EQUAL to {script}: {result.difference}\n{text}"
    if args.json is not None:
        write_text(args.json, json.dumps(_as_json(result), indent=1) + "\n")
    is_written = not args.dry_run and (result.is_equal or args.force)
    if is_written:
        target.write_bytes(text.encode())
    with printing_results():
        print(text)
        _show(result)
        if is_written:
            print(f"wrote {printable(str(target))}")
            print(f"next: everyrank train {shlex.quote(str(target))} --layout fsdp --processes 2")
    return 0 if result.is_equal else CHECK_FAILED


def verify_file(file: Path) -> str:
    """Compare the workload of a file under ddp on 2 ranks with one device; "" if they are equal, else why not."""
    from everyrank.api import verify
    from everyrank.launch import Launch
    from everyrank.workload import Source

    try:
        records = verify(Source(str(file)), ["ddp"], Launch(processes=2, device="cpu"), quick=True, show=False)
    except EveryrankError as error:
        return str(error)
    parity = records[0].parity
    if parity.status == "equal":
        return ""
    return parity.outcome + (f"; likely cause: {parity.cause}" if parity.cause else "")


def check_workload_options(args: argparse.Namespace, script: Path) -> None:
    """Raise `UsageError` for options that --to workload does not support, or an output file in another folder."""
    if args.out is not None and args.out.absolute().parent != script.absolute().parent:
        raise UsageError(f"-o {args.out}: put the workload next to {script.name}, because it has the same imports")
    for name, value in (
        ("--in-place", args.in_place),
        ("--check", args.check),
        ("--with", args.other),
        ("--html", args.html),
        ("--sampler", args.sampler != "batches"),
    ):
        if value:
            raise UsageError(f"--to workload: {name} is not supported; leave it out")


def _show(result: WorkloadResult) -> None:
    """Print the comparison, and the notes for the user."""
    print("checked:" if result.is_equal else "not equal:")
    if result.comparison.is_equal:
        precision = "float64" if result.float64 else "float32, because the script does not run in float64"
        dropout = ", all dropout left out" if result.without_dropout else ""
        gaps = ", ".join(f"{kind} {gap:.0e}" for kind, gap in result.comparison.largest.items() if kind != "buffers")
        print(
            f"  {result.comparison.updates} updates on one device equal the script's in {precision}{dropout}: "
            f"largest relative difference of {gaps}"
        )
        if not result.verified:
            print("  verify: equal on 2 ranks under ddp")
    if result.difference:
        print(f"  {printable(result.difference)}")
    if result.notes:
        print("\nleft to you:")
        for line, sentence in result.notes:
            print(f"  line {line}: {printable(sentence)}")
    print()


def _as_json(result: WorkloadResult) -> dict[str, Any]:
    comparison = result.comparison
    return {
        "equal": result.is_equal,
        "float64": result.float64,
        "without_dropout": result.without_dropout,
        "loss": result.choice.reduction,
        "left_to_you": [{"place": f"line {line}", "sentence": sentence} for line, sentence in result.notes],
        "comparisons": [
            {
                "ranks": 1,
                "updates": comparison.updates,
                "largest": comparison.largest,
                "difference": result.difference,
                "printed": [],
            }
        ],
        "text": result.text,
    }
