"""What `everyrank audit` finds in a DeepSpeed script: six planted mistakes, and the correct script under ZeRO 0 to 3.

Run: DS_ACCELERATOR=cpu python benchmarks/deepspeed_mistakes.py [--json F] [NAME ...]

Needs `pip install deepspeed` in the environment that runs it. Each audit starts two ranks on the CPU and takes half
a minute.
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

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a C++ extension is compiled at the first start
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
        "DeepSpeed divides by gradient_accumulation_steps itself",
    ),
    "multiplied by the number of ranks": (
        "engine.backward(loss)",
        "engine.backward(loss * world_size)",
        "gradient.scale",
        "a line for a library that sums gradients; DeepSpeed averages them",
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
        "initialize() without training_data= divides nothing",
    ),
    "set_epoch is missing": (
        "        sampler.set_epoch(epoch)\n",
        "",
        "data.epoch",
        "every epoch has the same order",
    ),
    "clipped by hand": (
        "            engine.step()\n",
        "            nn.utils.clip_grad_norm_(engine.parameters(), 0.5)\n            engine.step()\n",
        "clip.nothing",
        "the engine clips; .grad of a parameter holds one rank's gradient, or none",
    ),
}
"""Name -> (text of the script, replacement, beginning of the rule that should find it, what is wrong)."""


def audited(text: str, stage: int) -> dict[str, Any]:
    """The findings in a script under a stage of ZeRO, and what was not checked."""
    with tempfile.TemporaryDirectory() as folder:
        script, out, begin = Path(folder) / "train.py", Path(folder) / "audit.json", time.monotonic()
        script.write_text(text)
        command = [sys.executable, "-m", "everyrank", "audit", "--no-compare", "--json", str(out), str(script)]
        done = subprocess.run(
            [*command, str(stage)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
        if not out.exists():
            raise SystemExit(done.stderr)
        audit = json.loads(out.read_text())
    return {
        "stage": stage,
        "findings": [{key: each[key] for key in ("level", "rule", "text")} for each in audit["findings"]],
        "not_checked": audit.get("not_checked", []),
        "updates": audit["updates"],
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [("correct", stage, TRAIN, "") for stage in range(4)]
    for name, (before, after, rule, _) in MISTAKES.items():
        assert TRAIN.count(before) == 1, name
        cases.append((name, 2, TRAIN.replace(before, after), rule))
    for name, stage, text, rule in cases:
        if args.names and not any(word in name for word in args.names):
            continue
        row = audited(text, stage)
        rules = [each["rule"] for each in row["findings"] if each["level"] != "NOTE"]
        row["is_right"] = any(each.startswith(rule) for each in rules) if rule else not rules
        rows.append({"name": name, "expected": rule, **row})
        print(f"{name}, ZeRO {stage}: {', '.join(rules) or 'nothing'} ({row['seconds']} s)", flush=True)
    if args.json:
        about = {"deepspeed": importlib.metadata.version("deepspeed"), "rows": rows, "provenance": provenance()}
        args.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
