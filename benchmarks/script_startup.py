"""Measure the time of `everyrank launch` from the command to the first update of a script, relative to torchrun.

    python benchmarks/script_startup.py --json benchmarks/records/script-startup-cpu.json      # about three minutes

The script imports torch, calls `init_process_group`, wraps a small model in DDP and runs one update. All ways to start
it take turns, and a ratio divides times of the same round, so other programs slow both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("first update", flush=True)
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCH = (sys.executable, "-m", "everyrank", "launch", "--processes", "2")
WAYS = {
    "torchrun": TORCHRUN,
    "launch": LAUNCH,
    "launch, torch not imported first": LAUNCH,
    "launch --launcher torchrun": (*LAUNCH, "--launcher", "torchrun"),
    "torchrun with watch": (*TORCHRUN, "-m", "everyrank", "watch"),
}


def time_start(folder: Path, way: str) -> tuple[float, float]:
    """Start the script and return the seconds until its first update and until the command has ended."""
    script = folder / ("late.py" if "not imported first" in way else "train.py")
    start = time.perf_counter()
    process = subprocess.Popen(
        [*WAYS[way], str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    first_update_seconds = time.perf_counter() - start
    assert line == "first update\n", (way, line)
    process.stdout.read()
    assert process.wait(120) == 0, way
    return first_update_seconds, time.perf_counter() - start


def main() -> None:
    """Measure all ways, print and write the seconds and the ratios to torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "late.py").write_text(f"import os\n\nos.environ['LATE'] = '1'\n{SCRIPT}")
        for number in range(args.rounds + 1):  # the first round only fills the disk cache
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                seconds = time_start(folder, way)
                if number:
                    times[way].append(seconds)
    rows = []
    for way, pairs in times.items():
        base_pairs = times["torchrun"]
        ratios = [[pair[k] / base[k] for pair, base in zip(pairs, base_pairs, strict=True)] for k in (0, 1)]
        row = {
            "way": way,
            "first_update_seconds": statistics.median(pair[0] for pair in pairs),
            "end_seconds": statistics.median(pair[1] for pair in pairs),
            "first_update_ratio": statistics.median(ratios[0]),
            "end_ratio": statistics.median(ratios[1]),
            "first_update_ratios": [round(ratio, 3) for ratio in ratios[0]],
        }
        rows.append(row)
        print(
            f"{way}: first update after {row['first_update_seconds']:.2f} s ({row['first_update_ratio']:.2f} of "
            f"torchrun), end after {row['end_seconds']:.2f} s ({row['end_ratio']:.2f})",
            flush=True,
        )
    if args.json:
        provenance = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        content = {"rows": rows, "rounds": args.rounds, "provenance": provenance}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
