"""The same training over each backend: layouts beside each other on gloo, shm and mpi, the backends in turns.

    python benchmarks/backends.py                            # about half an hour, on a machine that does nothing else
    python docs/generate.py                                  # the table of docs/backends.md

Each round is one `everyrank bench` of each workload over each backend; a ratio is of one round, so that what slows the
machine for minutes slows both sides. The file has the Records of all rounds, in the order in which they ran.
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
DEFAULT = HERE / "records" / "backends-cpu.json"
LAYOUTS = {
    "digits": ["ddp", "zero1", "fsdp"],
    "text": ["ddp", "zero1", "fsdp", "tensor", "context", "pipeline:microbatches=4"],
    "mlp": ["ddp", "zero1", "fsdp"],
}
FILES = {"mlp": "benchmarks/mlp.py:workload"}  # the others are built in
WORDS = {"digits": ["--steps", "40"], "text": ["--steps", "10", "--batch", "8"], "mlp": ["--steps", "40"]}


def bench(workload: str, backend: str, words: list[str], folder: Path) -> list[Record]:
    """The Records of all layouts of a workload. Ends this process where the bench has failed."""
    path = folder / "bench.json"
    command = [sys.executable, "-P", "-m", "everyrank", "bench", FILES.get(workload, workload)]
    command += ["--layout", *LAYOUTS[workload]]
    command += ["--backend", backend, "--processes", "2", "--device", "cpu", "--json", str(path), *words]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[3:])}: status {done.returncode}")
    return read_records(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a backend gives to a training, layout by layout.")
    parser.add_argument("--backend", nargs="+", default=["gloo", "shm", "mpi"], help="default: gloo shm mpi")
    parser.add_argument("--workload", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    args = parser.parse_args()
    found: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        asked = list(itertools.product(range(args.rounds), args.workload, args.backend))
        for number, (_, workload, backend) in enumerate(asked, 1):
            print(f"{number} of {len(asked)}: {workload} over {backend}", file=sys.stderr)
            found += bench(workload, backend, ["--trials", str(args.trials), *WORDS[workload]], Path(folder))
    write_records(found, args.json)
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
