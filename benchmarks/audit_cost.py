"""Measure how much `everyrank audit` and `everyrank audit --watch` slow down a script's steps.

Run: python benchmarks/audit_cost.py [--rounds 7] [--json F]

The script trains on two ranks with DistributedDataParallel and prints the median time of its steps. Each round runs it
without an audit, with an audit and with --watch. Ratios divide times of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from everyrank.audit.start import rank_environments, run_script
from everyrank.audit.watch.recorder import Settings

SCRIPT = """
import statistics, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
if sys.argv[1] == "mlp":
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
else:
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10))
    inputs, labels = torch.randn(8, 64, 128), torch.randint(0, 10, (8, 10, 64)).argmax(1)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
times = []
for step in range(23):
    begin = time.perf_counter()
    output = model(inputs)
    loss = F.cross_entropy(output.flatten(0, -2), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    print("median", statistics.median(times[3:]), flush=True)
dist.barrier()
"""
MODES = ("without", "audit", "watch")


def median_step(mode: str, model: str) -> float:
    """Run the script once and return the median seconds of 20 steps."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        environments = [{**environment, "GLOO_SOCKET_IFNAME": "lo"} for environment in rank_environments(2)]
        if mode == "without":
            output = run_without_audit([sys.executable, str(script), model], environments)
        else:
            records = Path(folder) / "records"
            records.mkdir()
            is_watch = mode == "watch"
            settings = Settings(str(records), batches=0, records_functions=not is_watch, keep_files=is_watch)
            output = run_script([str(script), model], settings, environments, 60, 300, 2, lambda _: None).outputs[0]
    match = re.search(r"median (\S+)", output)
    assert match, output
    return float(match[1])


def run_without_audit(command: list[str], environments: list[dict[str, str]]) -> str:
    """Run the command on each rank and return the output of rank 0."""
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for environment in environments
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for model in ("mlp", "transformer"):
        rounds = [{mode: median_step(mode, model) for mode in MODES} for _ in range(args.rounds)]
        row = {"model": model, "step_seconds": statistics.median(seconds["without"] for seconds in rounds)}
        for mode in MODES[1:]:
            ratios = sorted(seconds[mode] / seconds["without"] for seconds in rounds)
            row[mode] = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {args.rounds} rounds"
            step = f"{model}: a step of {row['step_seconds'] * 1e3:.2f} ms"
            print(f"{step} takes {row[mode]['median']:.2f} times as long under {mode} ({spread})", flush=True)
        rows.append(row)
    if args.json:
        provenance = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        content = {"rows": rows, "rounds": args.rounds, "provenance": provenance}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
