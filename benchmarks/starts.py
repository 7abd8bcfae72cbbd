"""How long four ranks take to start: forked from one process that has imported torch, each by itself, and by torchrun.

    python benchmarks/starts.py --json benchmarks/records/starts-cpu.json      # two minutes

`everyrank train digits --layout ddp --processes 4`, one update, in turns: the seconds are those of the Record, from the
call to where the loop begins. The ratio is that of each round, so that what the machine does beside it counts on both
sides.
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
# as spawn was before there was a fork server, and is where forks are not safe
ALONE = "import sys; from everyrank import cli; from everyrank.launch import spawn; spawn._can_fork = lambda: False; "
ARMS = {
    "spawn, forked": ["-m", "everyrank", *JOB],
    "spawn, each rank by itself": ["-c", f"{ALONE}sys.exit(cli.main())", *JOB],
    "torchrun": ["-m", "everyrank", *JOB, "--launcher", "torchrun"],
}
BASE = "torchrun"


def start(words: list[str], processes: int) -> Record:
    """One start; its Record."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = ["--processes", str(processes), "--json", str(folder / "r"), "--out", str(folder / "out")]
        command = [sys.executable, "-P", *words, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return read_records(folder / "r")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from the command to the first update, by kind of start.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    last: dict[str, Record] = {}
    for number in range(args.rounds):
        for name, words in ARMS.items():
            last[name] = start(words, args.processes)
            seconds[name].append(last[name].startup_seconds or 0.0)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    table = Table("start", "seconds (95%)", f"x {BASE} (95%)")
    records: list[Record] = []
    for name, record in last.items():
        own = interval(seconds[name])
        ratio = interval([mine / theirs for mine, theirs in zip(seconds[name], seconds[BASE], strict=True)])
        table.add_row(
            name,
            f"{own.median:.2f} ({own.low:.2f} to {own.high:.2f})",
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        about = {"arm": name, "seconds": dataclasses.asdict(own), "ratio_to_torchrun": dataclasses.asdict(ratio)}
        records.append(
            dataclasses.replace(record, startup_seconds=own.median, provenance={**record.provenance, "startup": about})
        )
    Console().print(table)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
