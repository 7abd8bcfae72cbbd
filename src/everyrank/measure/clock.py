"""A clock that synchronises the device, and medians with bootstrap intervals."""

from __future__ import annotations

import time

import numpy as np
import torch

from everyrank.record import Interval

__all__ = ["interval", "now"]


def now(device: torch.device) -> float:
    """Return seconds on a monotonic clock, after synchronising the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interval(values: list[float], draws: int = 2000) -> Interval:
    """Return the median of `values` with its 95% bootstrap interval (percentiles; Efron 1979). The draws are seeded."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(data), size=(draws, len(data)))
    low, high = np.percentile(np.median(data[picks], axis=1), [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high), len(values))
