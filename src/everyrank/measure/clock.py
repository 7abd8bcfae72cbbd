"""A clock that synchronises the device, and medians with bootstrap intervals."""

from __future__ import annotations

import time

import numpy as np
import torch

from everyrank.record import Interval

__all__ = ["interval", "now"]


def now(device: torch.device) -> float:
    """Synchronise the device, then return the seconds of a monotonic clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interval(values: list[float], num_resamples: int = 2000) -> Interval:
    """Return the median of `values` with its 95% percentile-bootstrap interval (Efron 1979).

    The resamples are seeded, so the same values give the same interval.
    """
    samples = np.asarray(values, dtype=np.float64)
    shape = (num_resamples, len(samples))
    resampled_indices = np.random.default_rng(0).integers(0, len(samples), size=shape)
    low, high = np.percentile(np.median(samples[resampled_indices], axis=1), [2.5, 97.5])
    return Interval(float(np.median(samples)), float(low), float(high), len(values))
