"""Seconds of an update on 2 CPU ranks: as `everyrank bench` measures them, and as `everyrank plan` predicts them.

    python benchmarks/plan_time.py                      # writes benchmarks/records/plan-time-cpu.json

The machine is measured first (`plan --calibrate`), and each workload right after it. Run it on a quiet machine: two
ranks need two cores. A trial has 20 updates or takes a second, whichever is longer: another process on one of the cores
for a few milliseconds is half of 20 updates of `digits`. `--workloads mlp --steps 10` is a short run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from everyrank.errors import EveryrankError
from everyrank.layout import parse_layout
from everyrank.plan.calibrate import CALIBRATED, calibrate
from everyrank.plan.machine import Machine
from everyrank.plan.pretend import first_sample
from everyrank.plan.traced import time_layout
from everyrank.record import write_text
from everyrank.workload import Source, Workload
from everyrank.workload.find import load

OUT = Path(__file__).parent / "records" / "plan-time-cpu.json"
MLP = Path(__file__).parent / "plan_mlp.py"
WORKLOADS = {"digits": "digits", "text": "text", "mlp": str(MLP)}
BACKENDS = ("shm", "gloo")
TRIAL_SECONDS, MOST_STEPS = 1.0, 200


def measured(workload: str, layout: str, backend: str, steps: int) -> tuple[float, float, float] | str:
    """Return the seconds of an update with their interval, by everyrank bench; or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "everyrank", "bench", workload, "--layout", layout, "--processes", "2"]
        command += ["--device", "cpu", "--backend", backend, "--trials", "5", "--steps", str(steps), "--json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if not out.exists():
            return (done.stderr.strip().splitlines() or ["no record"])[-1][:200]
        read = json.loads(out.read_text())
        found = read["records"] if isinstance(read, dict) and "records" in read else read
        for record in found if isinstance(found, list) else [found]:
            seconds = record.get("step_seconds")
            if record.get("layout", "").startswith(layout) and seconds:
                return seconds["median"], seconds["low"], seconds["high"]
        return "bench did not time it"


def loader_seconds(workload: Workload, layout: str) -> float:
    """Return the seconds in which a rank reads its samples of an update."""
    dataset = workload.train_data()
    count = workload.global_batch // (1 if layout in ("tensor", "pipeline") else 2)
    collate: Callable[[Any], Any] = workload.collate or default_collate
    times: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        collate([dataset[index % len(dataset)] for index in range(count)])
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compared(name: str, machine: Machine, steps: int) -> list[dict[str, Any]]:
    """Return a row for each layout and backend of a workload."""
    workload = load(Source(WORKLOADS[name], {}, None))
    sample = first_sample(workload)
    rows: list[dict[str, Any]] = []
    for layout in CALIBRATED:
        for backend in BACKENDS:
            row: dict[str, Any] = {"workload": name, "layout": layout, "backend": backend}
            try:
                parts = time_layout(workload, parse_layout(layout), 2, sample, machine, backend)
            except EveryrankError as error:
                rows.append(row | {"reason": str(error)[:200]})
                continue
            parts["loader"] = loader_seconds(workload, layout)
            predicted = sum(parts.values())
            needed = min(MOST_STEPS, round(TRIAL_SECONDS / predicted))
            found = measured(WORKLOADS[name], layout, backend, max(steps, needed))
            if isinstance(found, str):
                rows.append(row | {"reason": found})
            else:
                rows.append(
                    row
                    | {"predicted_seconds": predicted, "parts": parts, "measured_seconds": found[0]}
                    | {"measured_low": found[1], "measured_high": found[2], "error": predicted / found[0] - 1}
                )
            last = rows[-1]
            text = f"{100 * last['error']:+.1f}%" if "error" in last else last["reason"]
            print(f"{name} {layout} {backend}: {text}", flush=True)
    return rows


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors, and of how many pairs of layouts of a workload and backend the faster one was predicted."""
    timed = [row for row in rows if "error" in row]
    errors = [abs(row["error"]) for row in timed]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(timed, 2)
        if (one["workload"], one["backend"]) == (other["workload"], other["backend"])
    ]
    in_order = [
        (one["predicted_seconds"] < other["predicted_seconds"]) == (one["measured_seconds"] < other["measured_seconds"])
        for one, other in pairs
    ]
    return {
        "rows": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "within_25_percent": sum(error <= 0.25 for error in errors) / len(errors) if errors else None,
        "too_fast": sum(row["error"] < 0 for row in timed),
        "pairs": len(pairs),
        "pairs_in_order": sum(in_order),
    }


def main() -> int:
    """Calibrate, predict, measure and write the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for name in args.workloads:
        machine = calibrate("cpu", BACKENDS)  # a minute before, as the prediction promises
        about = dict(machine.about)
        rows += compared(name, machine, args.steps)
    summary = summary_of(rows)
    print(summary)
    about |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__}
    result = {"command": "python benchmarks/plan_time.py", "provenance": about, "summary": summary, "rows": rows}
    write_text(args.out, json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
