"""Identify samples by their values, to find out which samples a rank has read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors

__all__ = ["count_missing_rows", "leaves", "row_values", "slice_rows"]


def row_values(batch: Batch) -> Tensor:
    """Return a value per sample that is almost surely unique, (size,) float64; zero padding does not change it."""
    if not batch.size:
        return torch.zeros(0, dtype=torch.float64)
    values = torch.zeros(batch.size, dtype=torch.float64)
    for index, leaf in enumerate(leaves((batch.input, batch.target))):
        if leaf.dim() and leaf.shape[0] == batch.size and not leaf.is_complex():
            flat = leaf.detach().reshape(batch.size, -1).cpu().double().nan_to_num(0.7, 0.8, 0.9)
            columns = torch.arange(flat.shape[1], dtype=torch.float64)
            column_weights = (columns * 0.7548776662466927 + 0.5) % 1.0 + 0.1 * (index + 1)
            values += flat @ column_weights
    return values


def leaves(value: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts, in order."""
    tensors: list[Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def count_missing_rows(expected: Tensor, values_read: Tensor) -> int:
    """Count the expected values that are missing in `values_read`, with multiplicity."""
    remaining = values_read.sort().values.tolist()
    missing, position = 0, 0
    for value in expected.sort().values.tolist():
        near = 1e-9 * max(1.0, abs(value))
        while position < len(remaining) and remaining[position] < value - near:
            position += 1
        if position < len(remaining) and abs(remaining[position] - value) <= near:
            position += 1
        else:
            missing += 1
    return missing


def slice_rows(value: Any, size: int, rows: slice) -> Any:
    """Select rows of every tensor in `value` whose first dimension is `size`."""
    return map_tensors(value, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == size else tensor)
