"""Fits latency and bandwidth to measured times: seconds = latency + bytes / bandwidth. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Cost", "fit_cost"]


@dataclass(frozen=True)
class Cost:
    """The cost of an operation: latency_seconds + bytes / bytes_per_second (inf if time does not grow with size).

    median_error, largest_error   of |fit - measured| / measured, over the sizes of the sweep
    """

    latency_seconds: float
    bytes_per_second: float
    median_error: float
    largest_error: float

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds for this size."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


def fit_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> Cost:
    """Fit a cost by least squares of relative errors, so that small sizes count as much as large ones.

    Source: Hockney 1994, The communication challenge for MPP. A negative latency or inverse bandwidth becomes 0.
    """
    size, time = np.asarray(num_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    columns = np.stack([1 / time, size / time], axis=1)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)  # bytes and ones differ by many powers of ten
    latency, inverse = np.linalg.lstsq(columns / scale, np.ones_like(time), rcond=None)[0] / scale
    if latency < 0:
        latency, inverse = 0.0, 1 / _weighted(time / np.maximum(size, 1e-300))
    elif inverse < 0:
        latency, inverse = _weighted(time), 0.0
    errors = np.abs(latency + size * inverse - time) / time
    bandwidth = float(1 / inverse) if inverse > 0 else float("inf")
    return Cost(float(latency), bandwidth, float(np.median(errors)), float(errors.max()))


def _weighted(values: np.ndarray) -> float:
    """Return the constant with the least squares of relative errors."""
    return float((1 / values).sum() / (1 / values**2).sum())
