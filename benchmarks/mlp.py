"""A workload dominated by communication: four wide layers with 17 MB of gradients in each update."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from everyrank import Workload

WIDTH = 1024
CLASSES = 10


def model() -> nn.Sequential:
    """Return a model of 4.2 million parameters, (N, 1024) -> (N, 10)."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def train_data() -> TensorDataset:
    """Return noise; the class of a sample is the index of the largest of its first ten numbers."""
    values = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, values[:, :CLASSES].argmax(1))


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def workload() -> Workload:
    """Return the workload. Its batch of 64 is 32 samples per rank on two ranks."""
    return Workload(
        name="mlp",
        model=model,
        train_data=train_data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch=64,
        epochs=1,
    )
