"""digits: a convolutional network with batch norm reads 1,797 real handwritten digits.

The data is shipped with the package (DIGITS.md says where it is from). Every fifth image is held out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank.builtin import ConvNet
from everyrank.builtin.classify import (
    best_class,
    check_at_least_one,
    check_dropout,
    classification_loss,
    count_correct,
)
from everyrank.builtin.convnet import NUM_GROUPS
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

__all__ = ["DATA", "Digits", "workload"]

DATA = Path(__file__).with_name("digits.csv.gz")


class Digits(TensorDataset):
    """The images as (1, 8, 8) in 0 to 1, and their digits; `is_validation` chooses every fifth one or the others."""

    def __init__(self, is_validation: bool) -> None:
        packed = DATA.read_bytes()
        self.checksum = "sha256:" + hashlib.sha256(packed).hexdigest()
        text = io.BytesIO(gzip.decompress(packed))
        rows = torch.from_numpy(np.loadtxt(text, delimiter=",", dtype=np.int64))
        is_fifth = torch.arange(len(rows)) % 5 == 4
        rows = rows[is_fifth if is_validation else ~is_fifth]
        super().__init__((rows[:, :64] / 16).reshape(-1, 1, 8, 8), rows[:, 64])


def workload(
    lr: float = 0.05,
    batch: int = 64,
    epochs: int = 10,
    width: int = 16,
    norm: str = "batch",
    seed: int = 0,
    dropout: float = 0.0,
) -> Workload:
    """The workload, with what `--set` may change. `norm` is batch or group."""
    check_dropout(dropout)
    if norm not in ("batch", "group"):
        raise WorkloadError(f"--set norm={norm}: give batch or group")
    check_at_least_one(width=width)
    if norm == "group" and width % NUM_GROUPS:
        raise WorkloadError(f"--set norm=group width={width}: give a width that is a multiple of {NUM_GROUPS}")

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)

    return Workload(
        name="digits",
        model=lambda: ConvNet(width=width, norm=norm, dropout=dropout),
        train_data=lambda: Digits(is_validation=False),
        eval_data=lambda: Digits(is_validation=True),
        loss=classification_loss,
        metrics={"top1": count_correct},
        predict=best_class,
        optimizer=optimizer,
        global_batch=batch,
        epochs=epochs,
        seed=seed,
        blocks="blocks",
    )
