"""A workload with one parameter, whose step time is the overhead of the training loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from everyrank import Workload


class Scale(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class Line(Dataset[tuple[Tensor, Tensor]]):
    """Samples of y = 3 x. It is no TensorDataset, because everyrank would read that by batch."""

    deterministic = True

    def __init__(self) -> None:
        self.values = torch.linspace(-1, 1, 1024).unsqueeze(1)
        self.targets = 3 * self.values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index], self.targets[index]


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), len(target)


def workload() -> Workload:
    """Return the workload. Its batch has only eight samples, so that reading them does not dominate the step."""
    return Workload(
        name="one",
        model=Scale,
        train_data=Line,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch=8,
        epochs=1,
    )
