"""Compare the step seconds that `everyrank plan` predicts on 2 CPU ranks with measurements of `everyrank bench`.

    python benchmarks/plan_time.py                      # writes benchmarks/records/plan-time-cpu.json

Run it on an idle machine with at least two cores. Before each workload the machine is calibrated (`plan --calibrate`).
A trial has at least 20 updates and takes at least a second. In a shorter trial, another program that runs for a few
milliseconds changes the result. `--workloads mlp --steps 10` is a short run.
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
TRIAL_SECONDS, MAX_STEPS = 1.0, 200


def measure(workload: str, layout: str, backend: str, steps: int) -> tuple[float, float, float] | str:
    """Run `everyrank bench`, and return the median step seconds with their interval, or an error message."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "everyrank", "bench", workload, "--layout", layout, "--processes", "2"]
        command += ["--device", "cpu", "--backend", backend, "--trials", "5", "--steps", str(steps), "--json", str(out)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if not out.exists():
            return (process.stderr.strip().splitlines() or ["no record"])[-1][:200]
        content = json.loads(out.read_text())
        records = content["records"] if isinstance(content, dict) and "records" in content else content
        for record in records if isinstance(records, list) else [records]:
            seconds = record.get("step_seconds")
            if record.get("layout", "").startswith(layout) and seconds:
                return seconds["median"], seconds["low"], seconds["high"]
        return "bench did not time it"


def loader_seconds(workload: Workload, layout: str) -> float:
    """Return the median seconds that a rank needs to read its samples of an update."""
    dataset = workload.train_data()
    count = workload.global_batch // (1 if layout in ("tensor", "pipeline") else 2)
    collate: Callable[[Any], Any] = workload.collate or default_collate
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        collate([dataset[index % len(dataset)] for index in range(count)])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(name: str, machine: Machine, steps: int) -> list[dict[str, Any]]:
    """Predict and measure each layout and backend of a workload, and return a row for each."""
    workload = load(Source(WORKLOADS[name], {}, None))
    sample = first_sample(workload)
    rows: list[dict[str, Any]] = []
    for layout in CALIBRATED:
        for backend in BACKENDS:
            row: dict[str, Any] = {"workload": name, "layout": layout, "backend": backend}
            try:
                phases = time_layout(workload, parse_layout(layout), 2, sample, machine, backend)
            except EveryrankError as error:
                rows.append(row | {"reason": str(error)[:200]})
                continue
            phases["loader"] = loader_seconds(workload, layout)
            predicted = sum(phases.values())
            long_enough = min(MAX_STEPS, round(TRIAL_SECONDS / predicted))
            measured = measure(WORKLOADS[name], layout, backend, max(steps, long_enough))
            if isinstance(measured, str):
                rows.append(row | {"reason": measured})
            else:
                rows.append(
                    row
                    | {"predicted_seconds": predicted, "parts": phases, "measured_seconds": measured[0]}
                    | {"measured_low": measured[1], "measured_high": measured[2], "error": predicted / measured[0] - 1}
                )
            last = rows[-1]
            text = f"{100 * last['error']:+.1f}%" if "error" in last else last["reason"]
            print(f"{name} {layout} {backend}: {text}", flush=True)
    return rows


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the prediction errors, and how many pairs of layouts are predicted in the right order.

    A pair has the same workload and backend.
    """
    timed = [row for row in rows if "error" in row]
    errors = [abs(row["error"]) for row in timed]
    pairs = [
        (first, second)
        for first, second in itertools.combinations(timed, 2)
        if (first["workload"], first["backend"]) == (second["workload"], second["backend"])
    ]
    in_order = [
        (first["predicted_seconds"] < second["predicted_seconds"])
        == (first["measured_seconds"] < second["measured_seconds"])
        for first, second in pairs
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
    """Calibrate, predict and measure, write the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=20, help="least number of updates of a trial")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    provenance: dict[str, Any] = {}
    for name in args.workloads:
        machine = calibrate(
            "cpu", BACKENDS
        )  # again for each workload, because the speed of a machine changes over time
        provenance = dict(machine.about)
        rows += compare(name, machine, args.steps)
    summary = summary_of(rows)
    print(summary)
    provenance |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__}
    result = {"command": "python benchmarks/plan_time.py", "provenance": provenance, "summary": summary, "rows": rows}
    write_text(args.out, json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
