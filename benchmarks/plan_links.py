"""Compare the all-reduce seconds that `everyrank plan` predicts inside a node with measurements of NCCL.

    python benchmarks/plan_links.py nccl_allreduce_lut.csv     # writes benchmarks/records/plan-links.json

The table needs the columns gpu, n_gpus, bytes and time_us. The links of V100 and A100 in plan/hardware.py are fitted
to the table of eth-easl/sailor (MIT), so the errors are in-sample. A link has a start time, a time per hop and a
bandwidth, which for V100 depends on the number of ranks. `--fit` prints the best values.
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


def predict(link: Link, ranks: Any, size: Any) -> Any:
    """Return the predicted all-reduce seconds of each row."""
    return collective_seconds("all_reduce", size, ranks, ranks, link, link)


def fit(ranks: Any, size: Any, seconds: Any) -> Link:
    """Return the link with the smallest mean error of log seconds.

    The bandwidth for a number of ranks is the largest that was measured for it.
    """
    bus_bandwidth = 2 * (ranks - 1) / ranks * size / seconds
    best = {count: float(bus_bandwidth[ranks == count].max()) for count in sorted(set(ranks))}
    bandwidths = np.array([best[count] for count in ranks])
    hops = 2 * np.minimum(ranks - 1, 2 * np.log2(ranks))

    def error(candidate: tuple[float, float, float]) -> float:
        start, hop, gain = candidate
        fitted_seconds = start + hop * hops + 2 * (ranks - 1) / ranks * size / bandwidths / gain
        return float(np.abs(np.log(fitted_seconds / seconds)).mean())

    grid = itertools.product(np.linspace(0, 60e-6, 61), np.linspace(0, 10e-6, 41), (1.0, 1.015, 1.03))
    start, hop, gain = min(grid, key=error)
    max_bandwidth = max(best.values())
    fractions = tuple(round(best[count] / max_bandwidth, 3) for count in best)
    return Link(float(hop), gain * max_bandwidth, "fitted", float(start), (fractions[0], *fractions))


def main() -> int:
    """Compare all rows of the table, print and write the errors, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV file of the measurements")
    parser.add_argument("--fit", action="store_true", help="print the link that fits best")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with args.table.open(encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for gpu in sorted({entry["gpu"] for entry in entries}):
        gpu_entries = [entry for entry in entries if entry["gpu"] == gpu]
        ranks, size = (np.array([int(entry[name]) for entry in gpu_entries]) for name in ("n_gpus", "bytes"))
        measured = np.array([1e-6 * float(entry["time_us"]) for entry in gpu_entries])
        link = find_gpu(gpu).inside
        if args.fit:
            print(gpu, fit(ranks, size, measured))
        predicted = predict(link, ranks, size)
        errors = predicted / measured - 1
        rows += [
            {"gpu": gpu, "ranks": int(count), "bytes": int(num_bytes)}
            | {"measured_seconds": real, "predicted_seconds": time}
            for count, num_bytes, real, time in zip(ranks, size, measured.tolist(), predicted.tolist(), strict=True)
        ]
        summary[gpu] = {
            "rows": len(gpu_entries),
            "mean_error": float(np.abs(errors).mean()),
            "median_error": float(np.median(np.abs(errors))),
            "largest_error": float(np.abs(errors).max()),
            "link": {"start": link.start, "hop": link.latency, "bandwidth": link.bandwidth, "shares": link.by_ranks},
        }
        print(gpu, summary[gpu])
    metadata = {
        "command": f"python benchmarks/plan_links.py {args.table.name}",
        "source": "eth-easl/sailor, measured with nccl-tests",
        "provenance": {
            "torch": importlib.metadata.version("torch"),
            "cores": os.cpu_count(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        },
    }
    write_text(args.out, json.dumps({**metadata, "in_sample": True, "summary": summary, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
