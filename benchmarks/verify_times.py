"""How long `everyrank verify` takes, beside another checkout of everyrank, in turns.

    git worktree add /tmp/before 251ee89
    python benchmarks/verify_times.py --before /tmp/before --json benchmarks/records/verify-cpu.json

Three arms: the other checkout, this one with nothing kept from earlier calls, and this one when the runs of `single`
are kept. The seconds are those of the whole command, from the shell and back; ratios are of the same turn.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from everyrank.measure.clock import interval
from everyrank.record import Record, write_records

HERE = Path(__file__).resolve().parents[1]
WORKLOADS = ("digits", "text")


def seconds_of(checkout: Path, workload: str, cache: str) -> float:
    """One call. Raises `CalledProcessError` where it does not say equal."""
    words = [sys.executable, "-P", "-m", "everyrank", "verify", workload, "--layout", "ddp", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": cache}
    start = time.perf_counter()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    assert "equal" in done.stdout, done.stdout
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records: list[Record] = []
    for workload in WORKLOADS:
        found: dict[str, list[float]] = {"before": [], "now": [], "now, kept": []}
        for _ in range(args.trials):
            with tempfile.TemporaryDirectory() as cache:
                found["before"].append(seconds_of(args.before.resolve(), workload, cache))
                found["now"].append(seconds_of(HERE, workload, cache))
                found["now, kept"].append(seconds_of(HERE, workload, cache))
        for arm, seconds in found.items():
            ratio = interval([own / before for own, before in zip(seconds, found["before"], strict=True)])
            whole = interval(seconds)
            print(
                f"{workload:8} {arm:10} {whole.median:6.1f} s ({whole.low:.1f} to {whole.high:.1f})   "
                f"{ratio.median:.2f} of before ({ratio.low:.2f} to {ratio.high:.2f})"
            )
            source = {
                "command": "python benchmarks/verify_times.py --before DIR",
                "arm": arm,
                "verify_seconds": seconds,
                "ratio_to_before": vars(ratio),
                "cores": os.cpu_count(),
                "load_after": os.getloadavg()[0],
            }
            records.append(Record(workload, "ddp", "spawn", "gloo", "cpu", 2, provenance=source))
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
