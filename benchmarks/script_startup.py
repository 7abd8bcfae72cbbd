"""How long `everyrank launch` takes from the command to the first all-reduce of a script, against torchrun.

    python benchmarks/script_startup.py --json benchmarks/records/script-startup-cpu.json      # about three minutes

The script imports torch, calls `init_process_group`, wraps a small model by DDP and does one update. All ways take
turns in each round, and a ratio is that of one round, so that other programs on the machine disturb both alike.
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


def seconds(folder: Path, name: str) -> tuple[float, float]:
    """From the command to the line after the first update, and to the end of the command."""
    script = folder / ("late.py" if "not imported first" in name else "train.py")
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*WAYS[name], str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    first = time.perf_counter() - begun
    assert line == "first update\n", (name, line)
    process.stdout.read()
    assert process.wait(120) == 0, name
    return first, time.perf_counter() - begun


def main() -> None:
    """Print and write the seconds and the ratios to torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "late.py").write_text(f"import os\n\nos.environ['LATE'] = '1'\n{SCRIPT}")
        for number in range(args.rounds + 1):  # the first one fills the caches of the disk
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                row = seconds(folder, way)
                if number:
                    times[way].append(row)
    rows = []
    for way, pairs in times.items():
        ratios = [[pair[k] / base[k] for pair, base in zip(pairs, times["torchrun"], strict=True)] for k in (0, 1)]
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
        source = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        args.json.write_text(json.dumps({"rows": rows, "rounds": args.rounds, "provenance": source}, indent=1) + "\n")


if __name__ == "__main__":
    main()
