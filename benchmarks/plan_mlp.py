"""A workload for plan_time.py that every layout can shard: two blocks of two wide layers, 17 MB of gradients."""

from __future__ import annotations

import torch
from mlp import CLASSES, WIDTH, loss, train_data
from torch import Tensor, nn

from everyrank import Workload


class Block(nn.Module):
    """A residual block of two layers, (N, 1024) -> (N, 1024)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(self.up(value).relu())


class Mlp(nn.Module):
    """A model of 4.2 million parameters, (N, 1024) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def workload() -> Workload:
    """Return the workload. Its batch of 64 is 32 samples per rank on two ranks."""
    return Workload(
        name="mlp",
        model=Mlp,
        train_data=train_data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch=64,
        blocks="blocks",
        tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
        epochs=1,
    )
