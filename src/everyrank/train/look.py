"""What the ranks of a training tell each other every few updates: their shares of the losses, and a few notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from everyrank.data import Update
from everyrank.world import World
from everyrank.world.collectives import sum_over_ranks

__all__ = ["DoneUpdate", "add_up"]


class DoneUpdate(NamedTuple):
    """An update that is done, whose losses nobody has looked at yet: its share, and the learning rate."""

    update: Update
    share: Tensor
    rate: float


def add_up(
    waiting: Sequence[DoneUpdate], notes: tuple[float, float], world: World
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """(sum, count) of each update over all ranks, and the sums of what each rank notes. One collective.

    Shares are float64 of shape (2,), on the rank's device.
    """
    shares = [done.share for done in waiting]
    own = torch.tensor([notes], dtype=torch.float64, device=shares[0].device)
    *rows, told = sum_over_ranks(torch.cat([torch.stack(shares), own]), world).tolist()
    return rows, told
