"""Check that `--save` and `--against` judge five changes right, of a workload and of a script on two ranks.

Run: python benchmarks/two_versions.py [--json F] [--torch PYTHON]

PYTHON belongs to an environment with everyrank and a different version of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silent_bugs import provenance

WORKLOAD = '''
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload


def data():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 64, generator=generator)
    return TensorDataset(values, values[:, :4].argmax(1))


def loss(output, target):
    return F.cross_entropy(output, target, reduction="sum"), len(target)


class Attention(nn.Module):
    """Scaled dot products over the 8 parts of a sample."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(64, 4)

    def forward(self, values):
        q, k, v = self.qkv(values.unflatten(1, (8, 8))).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
        return self.head((weights @ v).flatten(1))


workload = Workload(
    name="attention",
    model=Attention,
    train_data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    global_batch=32,
    epochs=2,
    seed=0,
)
'''
SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 0
dist.init_process_group("gloo")
torch.manual_seed(SEED)
values = torch.randn(192, 64)
data = TensorDataset(values, values[:, :4].argmax(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(64, 4)

    def forward(self, values):
        q, k, v = self.qkv(values.unflatten(1, (8, 8))).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
        return self.head((weights @ v).flatten(1))


model = DistributedDataParallel(Attention())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, seed=SEED)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, target in DataLoader(data, 16, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
"""
SCALE = ("/ 8**0.5", "/ 8")  # a bug: the square root was lost in a refactoring
FUSED = (  # equivalent: torch's function adds up in a different order
    "        weights = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)\n"
    "        return self.head((weights @ v).flatten(1))",
    "        from torch.nn.functional import scaled_dot_product_attention\n\n"
    "        return self.head(scaled_dot_product_attention(q, k, v).flatten(1))",
)
CHANGES: dict[str, dict[str, Any]] = {
    "a scale lost in a refactoring": {"edit": SCALE, "expected": "different"},
    "another torch": {"python": True, "expected": "equal"},
    "2 BLAS threads instead of 1": {"threads": "2", "expected": "equal"},
    "reordered sums: a fused function": {"edit": FUSED, "expected": "equal"},
    "another seed": {"seed": True, "expected": "not comparable"},
}


def run(python: str, folder: Path, kind: str, text: str, threads: str, flag: str) -> str:
    """Save the results of a workload or script, or compare with them, and return the output.

    kind  "workload" or "script"
    text  of the workload or script
    flag  "--save" or "--against"
    """
    name = "workload.py" if kind == "workload" else "train.py"
    (folder / name).write_text(text)
    arguments = ["verify", name, flag, "before.json"]
    if kind == "script":
        arguments = ["audit", "--processes", "2", flag, "before.json", name]
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    process = subprocess.run(
        [python, "-m", "everyrank", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    return process.stdout + process.stderr


def compare_changes(kind: str, other_python: str | None, add_row: Callable[[dict[str, Any]], None]) -> None:
    """Save the results of the original, compare each change with them, and call `add_row` with a row for each."""
    text = WORKLOAD if kind == "workload" else SCRIPT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = run(sys.executable, folder, kind, text, "1", "--save")
        if not (folder / "before.json").exists():
            raise SystemExit(output)
        for change, options in CHANGES.items():
            if options.get("python") and other_python is None:
                add_row({"kind": kind, "change": change, "status": "not verified here: no other torch"})
                continue
            edited = text.replace(*options["edit"]) if "edit" in options else text
            if options.get("seed"):
                edited = edited.replace("seed=0", "seed=1").replace("SEED = 0", "SEED = 1")
            python = str(other_python) if options.get("python") else sys.executable
            output = run(python, folder, kind, edited, options.get("threads", "1"), "--against")
            verdict = re.search(r"^(equal|different|not comparable)\b.*$", output, re.MULTILINE)
            status = verdict[1] if verdict else "failed"
            cause = re.search(r"^likely cause: (.*)$", output, re.MULTILINE)
            changed = re.search(r"^changed since then: (.*)$", output, re.MULTILINE)
            row = {"kind": kind, "change": change, "expected": options["expected"], "status": status}
            row |= {"line": verdict[0] if verdict else output[-600:], "cause": cause[1] if cause else ""}
            add_row({**row, "changed": changed[1] if changed else ""})
            print(f"{kind}, {change}: {row['line']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch", metavar="PYTHON", help="Python of an environment with a different version of torch")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    if args.torch:
        output = subprocess.check_output([args.torch, "-c", "import torch; print(torch.__version__)"], text=True)
        versions["other_torch"] = output.strip()

    def add_row(row: dict[str, Any]) -> None:  # writes each row at once, so a stopped run keeps its results
        rows.append(row)
        if args.json:
            args.json.write_text(json.dumps({"rows": rows, **versions, "provenance": provenance()}, indent=1) + "\n")

    for kind in ("workload", "script"):
        compare_changes(kind, args.torch, add_row)
    num_right = sum(row["status"] == row.get("expected") for row in rows)
    print(f"{num_right} of {len(rows)} judged right")


if __name__ == "__main__":
    main()
