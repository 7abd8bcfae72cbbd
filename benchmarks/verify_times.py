"""Measure the time of `everyrank verify`, relative to another checkout of everyrank.

    git worktree add /tmp/before 251ee89
    python benchmarks/verify_times.py --before /tmp/before --json benchmarks/records/verify-cpu.json

Three arms take turns: the other checkout, this one with an empty cache, and this one with the runs of `single`
in the cache. The time is that of the whole command. A ratio divides times of the same round.
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

CHECKOUT = Path(__file__).resolve().parents[1]
WORKLOADS = ("digits", "text")


def time_verify(checkout: Path, workload: str, cache: str) -> float:
    """Run `everyrank verify` once and return its seconds. Raises `CalledProcessError` if it fails."""
    command = [sys.executable, "-P", "-m", "everyrank", "verify", workload, "--layout", "ddp", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": cache}
    start = time.perf_counter()
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    assert "equal" in process.stdout, process.stdout
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records: list[Record] = []
    for workload in WORKLOADS:
        seconds_by_arm: dict[str, list[float]] = {"before": [], "now": [], "now, kept": []}
        for _ in range(args.trials):
            with tempfile.TemporaryDirectory() as cache:
                seconds_by_arm["before"].append(time_verify(args.before.resolve(), workload, cache))
                seconds_by_arm["now"].append(time_verify(CHECKOUT, workload, cache))
                seconds_by_arm["now, kept"].append(time_verify(CHECKOUT, workload, cache))
        for arm, seconds in seconds_by_arm.items():
            ratio = interval([now / before for now, before in zip(seconds, seconds_by_arm["before"], strict=True)])
            verify_seconds = interval(seconds)
            print(
                f"{workload:8} {arm:10} {verify_seconds.median:6.1f} s "
                f"({verify_seconds.low:.1f} to {verify_seconds.high:.1f})   "
                f"{ratio.median:.2f} of before ({ratio.low:.2f} to {ratio.high:.2f})"
            )
            provenance = {
                "command": "python benchmarks/verify_times.py --before DIR",
                "arm": arm,
                "verify_seconds": seconds,
                "ratio_to_before": vars(ratio),
                "cores": os.cpu_count(),
                "load_after": os.getloadavg()[0],
            }
            records.append(Record(workload, "ddp", "spawn", "gloo", "cpu", 2, provenance=provenance))
    if args.json is not None:
        write_records(records, args.json)


if __name__ == "__main__":
    main()
