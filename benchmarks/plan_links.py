"""Seconds of an all-reduce inside a node: as a table of NCCL measurements has them, and as `everyrank plan` has them.

    python benchmarks/plan_links.py nccl_allreduce_lut.csv     # writes benchmarks/records/plan-links.json

The table has the columns gpu, n_gpus, bytes, time_us and busbw_GBps. That of eth-easl/sailor (MIT) is what the links of
V100 and A100 in plan/hardware.py are fitted to: seconds of a start, seconds of a hop, and a bandwidth, which for V100
depends on the number of ranks. So the errors are in-sample. `--fit` prints the best numbers.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import itertools
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from everyrank.plan.hardware import Link, find_gpu
from everyrank.plan.step_time import collective_seconds
from everyrank.record import write_text

OUT = Path(__file__).parent / "records" / "plan-links.json"


def predicted(link: Link, ranks: Any, size: Any) -> Any:
    """Return the seconds of each row in a node with such links."""
    return collective_seconds("all_reduce", size, ranks, ranks, link, link)


def fit(ranks: Any, size: Any, seconds: Any) -> Link:
    """Return the link with the least mean error: each number of ranks has the bandwidth of its largest message."""
    bus = 2 * (ranks - 1) / ranks * size / seconds
    best = {count: float(bus[ranks == count].max()) for count in sorted(set(ranks))}
    rates = np.array([best[count] for count in ranks])
    hops = 2 * np.minimum(ranks - 1, 2 * np.log2(ranks))

    def error(numbers: tuple[float, float, float]) -> float:
        start, hop, gain = numbers
        return float(
            np.abs(np.log((start + hop * hops + 2 * (ranks - 1) / ranks * size / rates / gain) / seconds)).mean()
        )

    grid = itertools.product(np.linspace(0, 60e-6, 61), np.linspace(0, 10e-6, 41), (1.0, 1.015, 1.03))
    start, hop, gain = min(grid, key=error)
    whole = max(best.values())
    shares = tuple(round(best[count] / whole, 3) for count in best)
    return Link(float(hop), gain * whole, "fitted", float(start), (shares[0], *shares))


def main() -> int:
    """Compare, print and write the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with args.table.open(encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for kind in sorted({entry["gpu"] for entry in entries}):
        chosen = [entry for entry in entries if entry["gpu"] == kind]
        ranks, size = (np.array([int(entry[name]) for entry in chosen]) for name in ("n_gpus", "bytes"))
        seconds = np.array([1e-6 * float(entry["time_us"]) for entry in chosen])
        link = find_gpu(kind).inside
        if args.fit:
            print(kind, fit(ranks, size, seconds))
        found = predicted(link, ranks, size)
        errors = found / seconds - 1
        rows += [
            {"gpu": kind, "ranks": int(count), "bytes": int(whole), "measured_seconds": real, "predicted_seconds": time}
            for count, whole, real, time in zip(ranks, size, seconds.tolist(), found.tolist(), strict=True)
        ]
        summary[kind] = {
            "rows": len(chosen),
            "mean_error": float(np.abs(errors).mean()),
            "median_error": float(np.median(np.abs(errors))),
            "largest_error": float(np.abs(errors).max()),
            "link": {"start": link.start, "hop": link.latency, "bandwidth": link.bandwidth, "shares": link.by_ranks},
        }
        print(kind, summary[kind])
    about = {
        "command": f"python benchmarks/plan_links.py {args.table.name}",
        "source": "eth-easl/sailor, measured with nccl-tests",
        "provenance": {
            "torch": importlib.metadata.version("torch"),
            "cores": os.cpu_count(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        },
    }
    write_text(args.out, json.dumps({**about, "in_sample": True, "summary": summary, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
