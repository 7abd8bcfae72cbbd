"""What a script's own step costs without an audit, under `everyrank audit`, and under `--watch`, in turns.

Run: python benchmarks/audit_cost.py [--rounds 7] [--json F]

Two ranks under DistributedDataParallel; the script takes its own times and prints the median of its steps. Of each
round the three are started one after the other; ratios are of the same round.
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
HOW = ("without", "audit", "watch")


def median_step(how: str, model: str) -> float:
    """Seconds: the median of 20 steps of one start."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        ranks = [{**ranks, "GLOO_SOCKET_IFNAME": "lo"} for ranks in rank_environments(2)]
        if how == "without":
            output = plain([sys.executable, str(script), model], ranks)
        else:
            records = Path(folder) / "records"
            records.mkdir()
            is_watch = how == "watch"
            settings = Settings(str(records), batches=0, records_functions=not is_watch, keep_files=is_watch)
            output = run_script([str(script), model], settings, ranks, 60, 300, 2, lambda _: None).outputs[0]
    found = re.search(r"median (\S+)", output)
    assert found, output
    return float(found[1])


def plain(command: list[str], ranks: list[dict[str, str]]) -> str:
    """What rank 0 prints."""
    started = [
        subprocess.Popen(
            command, env={**os.environ, **one}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for one in ranks
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for model in ("mlp", "transformer"):
        times = [{how: median_step(how, model) for how in HOW} for _ in range(args.rounds)]
        row = {"model": model, "step_seconds": statistics.median(one["without"] for one in times)}
        for how in HOW[1:]:
            ratios = sorted(one[how] / one["without"] for one in times)
            row[how] = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {args.rounds} rounds"
            step = f"{model}: a step of {row['step_seconds'] * 1e3:.2f} ms"
            print(f"{step} costs {row[how]['median']:.2f} times as much under {how} ({spread})", flush=True)
        rows.append(row)
    if args.json:
        source = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        args.json.write_text(json.dumps({"rows": rows, "rounds": args.rounds, "provenance": source}, indent=1) + "\n")


if __name__ == "__main__":
    main()
