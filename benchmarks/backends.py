"""Benchmark the same layouts over the backends gloo, shm and mpi.

    python benchmarks/backends.py                            # about half an hour, on a machine that does nothing else
    python docs/generate.py                                  # the table of docs/backends.md

In each round every workload runs in one `everyrank bench` over each backend. The backends take turns, and docs/generate
divides times of the same round. A slow minute of the machine thus slows both sides of a ratio. The Records of all
rounds are in the file in the order in which they were measured. The file is written after each bench.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from everyrank import Record, read_records
from everyrank.record import write_records

HERE = Path(__file__).parent
DEFAULT_JSON = HERE / "records" / "backends-cpu.json"
LAYOUTS = {
    "digits": ["ddp", "zero1", "fsdp"],
    "text": ["ddp", "zero1", "fsdp", "tensor", "context", "pipeline:microbatches=4"],
    "mlp": ["ddp", "zero1", "fsdp"],
}
FILES = {"mlp": "benchmarks/mlp.py:workload"}  # the other workloads are built in
BENCH_FLAGS = {"digits": ["--steps", "40"], "text": ["--steps", "10", "--batch", "8"], "mlp": ["--steps", "40"]}


def bench(workload: str, backend: str, flags: list[str], folder: Path) -> list[Record]:
    """Return the Records of all layouts of a workload. Exits if the bench fails."""
    path = folder / "bench.json"
    command = [sys.executable, "-P", "-m", "everyrank", "bench", FILES.get(workload, workload)]
    command += ["--layout", *LAYOUTS[workload]]
    command += ["--backend", backend, "--processes", "2", "--device", "cpu", "--json", str(path), *flags]
    process = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.DEVNULL, check=False)
    if process.returncode:
        sys.exit(
            f"{' '.join(command[3:])} failed with exit code {process.returncode}. "
            "The Records of the benches before it are written."
        )
    return read_records(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["gloo", "shm", "mpi"], help="default: gloo shm mpi")
    parser.add_argument("--workload", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON)
    args = parser.parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        benches = list(itertools.product(range(args.rounds), args.workload, args.backend))
        for number, (_, workload, backend) in enumerate(benches, 1):
            print(f"{number} of {len(benches)}: {workload} over {backend}", file=sys.stderr)
            records += bench(workload, backend, ["--trials", str(args.trials), *BENCH_FLAGS[workload]], Path(folder))
            write_records(records, args.json)  # a later bench may fail
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
