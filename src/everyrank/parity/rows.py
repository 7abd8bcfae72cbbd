"""Which samples were computed on, told from what they hold: a value for each sample of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors

__all__ = ["cut_rows", "leaves", "missing_rows", "row_values"]


def row_values(batch: Batch) -> Tensor:
    """A value for each sample of a batch, which hardly two samples share; (size,) float64, padding by zeros aside."""
    if not batch.size:
        return torch.zeros(0, dtype=torch.float64)
    values = torch.zeros(batch.size, dtype=torch.float64)
    for number, leaf in enumerate(leaves((batch.input, batch.target))):
        if leaf.dim() and leaf.shape[0] == batch.size and not leaf.is_complex():
            flat = leaf.detach().reshape(batch.size, -1).cpu().double().nan_to_num(0.7, 0.8, 0.9)
            places = (torch.arange(flat.shape[1], dtype=torch.float64) * 0.7548776662466927 + 0.5) % 1.0 + 0.1 * (
                number + 1
            )
            values += flat @ places
    return values


def leaves(value: Any) -> list[Tensor]:
    """All tensors in `value`, in order."""
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return found


def missing_rows(expected: Tensor, found: Tensor) -> int:
    """How many of the expected values were not found, each as often as it is expected."""
    left = found.sort().values.tolist()
    missing, place = 0, 0
    for value in expected.sort().values.tolist():
        near = 1e-9 * max(1.0, abs(value))
        while place < len(left) and left[place] < value - near:
            place += 1
        if place < len(left) and abs(left[place] - value) <= near:
            place += 1
        else:
            missing += 1
    return missing


def cut_rows(value: Any, size: int, rows: slice) -> Any:
    """Some rows of every tensor in `value` that has a row for each of `size` samples."""
    return map_tensors(value, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == size else tensor)
