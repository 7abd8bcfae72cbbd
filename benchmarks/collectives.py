"""Measure collectives: everyrank's algorithms and gloo's own all-reduce, and all operations on several backends.

    python benchmarks/collectives.py                         # fifteen minutes, on a machine that does nothing else
    python docs/generate.py                                  # the tables of docs/collectives.md

Each comparison is one run of `everyrank comm`, in which the algorithms or backends take turns. The file has the rows
and fitted costs of all runs with their numbers of ranks, the commands and the machine.

The all-reduce over the first two backends is measured in nine starts, because one start is not representative. A tenth
of gloo's calls takes ten times as long as the rest, and each start places the ranks on different cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_JSON = Path(__file__).parent / "records" / "collectives-cpu.json"
STARTS = 9


def comparison_flags(backends: list[str], sizes: list[str], seconds: float) -> list[list[str]]:
    """Return the flags of each run: all-reduce by every algorithm on 2 and 4 ranks, every operation on every backend.

    Horovod's thread wakes up every millisecond. Horovod has its own run with the first backend, to not slow the others.
    """
    common = ["--sizes", *sizes, "--seconds", str(seconds), "--device", "cpu"]
    runs = [
        [*common, "--op", "all_reduce", "--algorithm", "all", "--backend", "gloo", "--processes", str(ranks)]
        for ranks in (2, 4)
    ]
    without_horovod = [name for name in backends if name != "horovod"]
    runs.append([*common, "--backend", *without_horovod, "--processes", "2"])
    if "horovod" in backends:
        runs.append([*common, "--backend", without_horovod[0], "horovod", "--processes", "2"])
    return runs


def repeated_flags(backends: list[str], seconds: float) -> list[str]:
    """Return the flags of the run in several starts: all-reduce of two sizes over the first two backends."""
    flags = ["--sizes", "64KiB", "32MiB", "--seconds", str(seconds), "--device", "cpu", "--op", "all_reduce"]
    return [*flags, "--backend", *backends[:2], "--processes", "2"]


def run_comm(flags: list[str], folder: Path) -> dict[str, Any]:
    """Return the JSON result of `everyrank comm`. Exits if it fails."""
    path = folder / "comm.json"
    command = [sys.executable, "-P", "-m", "everyrank", "comm", *flags, "--json", str(path)]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if process.returncode:
        sys.exit(f"everyrank comm {' '.join(flags)} failed with exit code {process.returncode}")
    result: dict[str, Any] = json.loads(path.read_text())
    if "horovod" in flags:  # the rows of the first backend are in an earlier result
        for key in ("rows", "costs", "strides"):
            result[key] = [row for row in result[key] if row["backend"] == "horovod"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["gloo", "shm", "mpi", "horovod"],
        help="the others are compared with the first (default: gloo shm mpi horovod)",
    )
    parser.add_argument("--sizes", nargs="+", default=["4:64MiB"])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON)
    args = parser.parse_args()
    if set(args.backend) == {"horovod"}:
        parser.error("--backend horovod: no other backend to compare it with; give --backend gloo horovod")
    runs = comparison_flags(args.backend, args.sizes, args.seconds)
    repeated = repeated_flags(args.backend, args.seconds)
    results: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, flags in enumerate(runs, 1):
            print(f"{number} of {len(runs)}: everyrank comm {' '.join(flags)}", file=sys.stderr)
            results.append(run_comm(flags, Path(folder)))
        for number in range(1, STARTS + 1):
            print(f"start {number} of {STARTS}: everyrank comm {' '.join(repeated)}", file=sys.stderr)
            starts.append(run_comm(repeated, Path(folder)))
    last = results[-1]
    machine = {key: value for key, value in last["machine"].items() if key not in ("choices", "threads_per_rank")}
    merged = {
        "provenance": {
            "date": last["time"],
            "commands": [" ".join(result["command"]) for result in (*results, starts[0])],
            **machine,
        },
        "copies": [{"ranks": result["world"]["size"], **result["copy"]} for result in results],
        **{key: [row for result in results for row in result[key]] for key in ("rows", "costs", "strides")},
        "starts": [{"start": number, **row} for number, result in enumerate(starts, 1) for row in result["rows"]],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
