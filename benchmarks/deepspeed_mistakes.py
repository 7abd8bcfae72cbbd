"""Run `everyrank audit` on a DeepSpeed script: with six planted mistakes, and correct with ZeRO 0 to 3.

Run: DS_ACCELERATOR=cpu python benchmarks/deepspeed_mistakes.py [--json F] [NAME ...]

Needs `pip install deepspeed`. Each audit starts two ranks on the CPU and takes half a minute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from silent_bugs import provenance

TRAIN = """
import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise the first start compiles a C++ extension
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}


def main():
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (96,), generator=generator)
    data = TensorDataset(torch.randn(96, 10, generator=generator), labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = F.cross_entropy(engine(inputs), target)
            engine.backward(loss)
            engine.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


main()
"""
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "divided twice by the accumulation steps": (
        "engine.backward(loss)",
        "engine.backward(loss / CONFIG['gradient_accumulation_steps'])",
        "gradient.scale",
        "DeepSpeed already divides by gradient_accumulation_steps",
    ),
    "multiplied by the number of ranks": (
        "engine.backward(loss)",
        "engine.backward(loss * world_size)",
        "gradient.scale",
        "DeepSpeed averages gradients; this line is for a library that sums them",
    ),
    "mean over the local labels that count": (
        "F.cross_entropy(engine(inputs), target)",
        "F.cross_entropy(engine(inputs), torch.where(target == 3, -100, target))",
        "gradient.ragged",
        "ranks and micro-batches have different numbers of labels, and their means are averaged",
    ),
    "every rank reads all samples": (
        "DataLoader(data, 4, sampler=sampler)",
        "DataLoader(data, 4, shuffle=True)",
        "data",
        "without training_data= initialize() does not shard the data",
    ),
    "set_epoch is missing": (
        "        sampler.set_epoch(epoch)\n",
        "",
        "data.epoch",
        "every epoch reads the samples in the same order",
    ),
    "clipped by hand": (
        "            engine.step()\n",
        "            nn.utils.clip_grad_norm_(engine.parameters(), 0.5)\n            engine.step()\n",
        "clip.nothing",
        "the engine clips; .grad of a parameter is the local gradient, or None",
    ),
}
"""Name -> (text of the script, replacement, prefix of the rule that should report it, explanation)."""


def audit_script(text: str, stage: int) -> dict[str, Any]:
    """Audit a script with a ZeRO stage and return the findings and the skipped checks."""
    with tempfile.TemporaryDirectory() as folder:
        script, out, start = Path(folder) / "train.py", Path(folder) / "audit.json", time.monotonic()
        script.write_text(text)
        command = [sys.executable, "-m", "everyrank", "audit", "--no-compare", "--json", str(out), str(script)]
        process = subprocess.run(
            [*command, str(stage)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
        if not out.exists():
            raise SystemExit(f"everyrank audit failed with exit code {process.returncode}:\n{process.stderr}")
        audit = json.loads(out.read_text())
    return {
        "stage": stage,
        "findings": [{key: finding[key] for key in ("level", "rule", "text")} for finding in audit["findings"]],
        "not_checked": audit.get("not_checked", []),
        "updates": audit["updates"],
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [("correct", stage, TRAIN, "") for stage in range(4)]
    for name, (old, new, expected_rule, _) in MISTAKES.items():
        assert TRAIN.count(old) == 1, name
        cases.append((name, 2, TRAIN.replace(old, new), expected_rule))
    for name, stage, text, expected_rule in cases:
        if args.names and not any(pattern in name for pattern in args.names):
            continue
        row = audit_script(text, stage)
        rules = [finding["rule"] for finding in row["findings"] if finding["level"] != "NOTE"]
        row["is_right"] = any(rule.startswith(expected_rule) for rule in rules) if expected_rule else not rules
        rows.append({"name": name, "expected": expected_rule, **row})
        print(f"{name}, ZeRO {stage}: {', '.join(rules) or 'no finding'} ({row['seconds']} s)", flush=True)
    if args.json:
        content = {"deepspeed": importlib.metadata.version("deepspeed"), "rows": rows, "provenance": provenance()}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
