"""Measure the start time of four ranks: forked from a process that has imported torch, spawned, and with torchrun.

    python benchmarks/starts.py --json benchmarks/records/starts-cpu.json      # two minutes

Each start is `everyrank train digits --layout ddp --processes 4` with one update. The time is `startup_seconds` of its
Record, from the command to the start of the training loop. The ways to start take turns, and a ratio divides times of
the same round, so other programs slow both.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everyrank import Record, read_records
from everyrank.measure.clock import interval
from everyrank.record import write_records

JOB = ["train", "digits", "--layout", "ddp", "--steps", "1", "--save-every", "0"]
# what spawn does where a fork is not safe
NO_FORK = "import sys; from everyrank import cli; from everyrank.launch import spawn; spawn._can_fork = lambda: False; "
ARMS = {
    "spawn, forked": ["-m", "everyrank", *JOB],
    "spawn, each rank by itself": ["-c", f"{NO_FORK}sys.exit(cli.main())", *JOB],
    "torchrun": ["-m", "everyrank", *JOB, "--launcher", "torchrun"],
}
BASE = "torchrun"


def start(arguments: list[str], processes: int) -> Record:
    """Start a training once and return its Record. Exits if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--processes", str(processes), "--json", str(folder / "r"), "--out", str(folder / "out")]
        command = [sys.executable, "-P", *arguments, *flags]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if process.returncode:
            sys.exit(f"the training failed with exit code {process.returncode}:\n{process.stderr}")
        return read_records(folder / "r")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    last: dict[str, Record] = {}
    for number in range(args.rounds):
        for name, arguments in ARMS.items():
            last[name] = start(arguments, args.processes)
            seconds[name].append(last[name].startup_seconds or 0.0)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    table = Table("start", "seconds (95%)", f"x {BASE} (95%)")
    records: list[Record] = []
    for name, record in last.items():
        time = interval(seconds[name])
        ratio = interval([value / base for value, base in zip(seconds[name], seconds[BASE], strict=True)])
        table.add_row(
            name,
            f"{time.median:.2f} ({time.low:.2f} to {time.high:.2f})",
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        fields = {"arm": name, "seconds": dataclasses.asdict(time), "ratio_to_torchrun": dataclasses.asdict(ratio)}
        provenance = {**record.provenance, "startup": fields}
        records.append(dataclasses.replace(record, startup_seconds=time.median, provenance=provenance))
    Console().print(table)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
