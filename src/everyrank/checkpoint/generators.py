"""Saves and restores the random generators of Python and numpy, as one tensor.

torch's generators need no saving, because every update seeds them from (seed, step, rank). The user's model or loss may
use those of Python and numpy, which are not seeded.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["generators", "set_generators"]

_PYTHON = 625  # words of Python's Mersenne Twister, and the position in them
_NUMPY = 624


def generators() -> Tensor:
    """Return the states of the generators: float64, shape (1253,), which represents every 32-bit word exactly."""
    _, python_words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached_gauss = legacy
    python = [*python_words, math.nan if gauss is None else gauss]
    return torch.tensor([*python, *keys.tolist(), position, has_gauss, cached_gauss], dtype=torch.float64)


def set_generators(state: Tensor) -> None:
    """Restore a state from `generators`."""
    values: list[float] = state.tolist()
    gauss = values[_PYTHON]
    random.setstate((3, tuple(int(word) for word in values[:_PYTHON]), None if math.isnan(gauss) else gauss))
    keys = np.asarray(values[_PYTHON + 1 : _PYTHON + 1 + _NUMPY]).astype(np.uint32)
    position, has_gauss, cached_gauss = values[_PYTHON + 1 + _NUMPY :]
    legacy: Any = ("MT19937", keys, int(position), int(has_gauss), cached_gauss)
    np.random.set_state(legacy)
