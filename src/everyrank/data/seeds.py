"""Derive seeds from several numbers, and seed the random generators of a sample."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["mix", "seed_sample"]


def mix(*numbers: int) -> int:
    """Derive a 63-bit seed from several numbers (the splitmix64 finaliser, Steele 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed torch (CPU), Python and numpy by these three numbers."""
    mixed = mix(seed, epoch, sample)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
