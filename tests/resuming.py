"""What the tests of going on share: a workload with noise, and what a run leaves."""

from __future__ import annotations

import csv
import json
from pathlib import Path

WORKLOAD = """\
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from everyrank import Workload

SLEEP = float(os.environ.get("SLEEP", "0"))  # of every sample


class Noisy(Dataset):
    def __init__(self, length, noise):
        generator = torch.Generator().manual_seed(length)
        self.inputs = torch.randn(length, 5, generator=generator)
        self.targets = torch.randn(length, 2, generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.noise:
            time.sleep(SLEEP)
            Path("reached").touch()
        noise = torch.randn(5) + random.random() + float(np.random.rand())
        return self.inputs[index] + self.noise * noise, self.targets[index]


def squared(output, target):
    return (output - target).square().sum(), len(target)


def model():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 2))


workload = Workload(
    name="mine",
    model=model,
    train_data=lambda: Noisy(46, 0.1),
    eval_data=lambda: Noisy(16, 0.0),
    loss=squared,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8),
    global_batch=8,
    clip_norm=1.0,
    steps=30,
)
"""


def words_for(layout: str, *more: str, out: str = "run") -> list[str]:
    (options, comma) = (layout.partition(":")[2], "," if ":" in layout else ":")
    assert not options or comma == ","
    return [
        "train",
        "mine.py",
        "--layout",
        f"{layout}{comma}precision=float64",
        "--save-every",
        "5",
        "--out",
        out,
        *more,
    ]


def logged(run: Path) -> list[tuple[int, int, float, float, float]]:
    """Step, epoch, loss, rate and number of terms of every update in the log, in the order of the file."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["epoch"], row["loss"], row["lr"], row["terms"]) for row in rows if "step" in row]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


WIDTH = ("--set", "width=4")

SPOILT = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

data = lambda: TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.linspace(1, 0, 32).reshape(16, 2))


def rises(output, target):
    raise ValueError("no such metric")


def derives(metrics):
    raise ValueError("nothing to derive")


def first_model():
    return nn.Linear(3, 2)


workload = Workload(
    name="spoilt",
    model=first_model,
    train_data=data,
    eval_data=data,
    loss=lambda output, target: (((output - target) ** 2).sum(), target.numel()),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
    global_batch=4,
    epochs=2,
    MORE
)
"""


def spoilt(folder: Path, rate: str = "0.01", more: str = "") -> str:
    (folder / "spoilt.py").write_text(SPOILT.replace("RATE", rate).replace("MORE", more))
    return str(folder / "spoilt.py")
