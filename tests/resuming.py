"""Helpers for the tests of resume: workloads that tests write to files, and readers of the logs of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

# The file mine.py: a workload with random noise in its samples. SLEEP is the seconds that each training sample takes.
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

SLEEP = float(os.environ.get("SLEEP", "0"))  # seconds per training sample


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


def train_args(layout: str, *more_args: str, out: str = "run") -> list[str]:
    """Return the arguments that train mine.py in float64 and save every fifth update."""
    separator = "," if ":" in layout else ":"
    return [
        "train",
        "mine.py",
        "--layout",
        f"{layout}{separator}precision=float64",
        "--save-every",
        "5",
        "--out",
        out,
        *more_args,
    ]


def logged_updates(run: Path) -> list[tuple[int, int, float, float, float]]:
    """Return step, epoch, loss, learning rate and number of loss terms of each update, in the order of the log."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["epoch"], row["loss"], row["lr"], row["terms"]) for row in rows if "step" in row]


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


WIDTH_ARGS = ("--set", "width=4")  # these make the model of digits small

# A workload with a linear model. RATE is the learning rate, and MORE stands for further fields.
LINEAR_WORKLOAD = """\
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


def write_linear_workload(folder: Path, learning_rate: str = "0.01", more_fields: str = "") -> str:
    """Write LINEAR_WORKLOAD to spoilt.py, and return the path."""
    path = folder / "spoilt.py"
    path.write_text(LINEAR_WORKLOAD.replace("RATE", learning_rate).replace("MORE", more_fields))
    return str(path)
