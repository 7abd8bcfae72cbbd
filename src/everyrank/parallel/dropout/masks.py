"""Dropout masks from a hash: whether an element is kept depends on its position in the tensor.

A random generator draws numbers in sequence, so its mask depends on how a tensor is split. A hash does not. A key of 64
bits identifies the mask. Hashed with the index of a row (one dimension after the other, except the last) it becomes the
key of the row. Hashed with the index of a word it becomes 64 bits, which decide four adjacent elements, 16 bits each:

    key of call and sample --+ row--> key of the row --+ word--> 64 bits: 16 16 16 16
                                                                 element 4w .. 4w + 3 is kept if its 16 bits are >= p

Each step is the finaliser of splitmix64 applied to key + index * constant. It needs only integer additions, products,
shifts and xors with wrap-around, which give the same bits on every device, compiled or not.

Source: Steele, Lea and Flood 2014 (splitmix64); Salmon et al. 2011 (generators that are functions of a counter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DimPart", "dropped_share", "keep_mask", "mix_bits", "row_keys", "sample_keys", "whole_dim"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed integer with the same bits
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_LANES = 4  # elements per word
_LEVELS = 1 << 16  # values of the 16 bits of an element


@dataclass(frozen=True)
class DimPart:
    """The part of a tensor dimension on this rank: ranges of positions, of `size` over all ranks."""

    pieces: tuple[range, ...]
    size: int


def whole_dim(size: int) -> DimPart:
    """Return the whole dimension."""
    return DimPart((range(size),), size)


def mix_bits(state: Tensor) -> Tensor:
    """The finaliser of splitmix64: int64 -> int64, of any shape. `state` is overwritten."""
    state ^= (state >> 30) & ((1 << 34) - 1)  # torch shifts in the sign bit; the mask clears it
    state *= _FIRST
    state ^= (state >> 27) & ((1 << 37) - 1)
    state *= _SECOND
    state ^= (state >> 31) & ((1 << 33) - 1)
    return state


def sample_keys(seed: int, places: Sequence[int], device: torch.device) -> Tensor:
    """Return a key for each sample, from its position in the update: int64, (B,)."""
    if isinstance(places, range):  # created on the device, without synchronisation
        numbers = torch.arange(places.start, places.stop, places.step, device=device)
    else:
        numbers = torch.tensor(list(places), device=device)
    return mix_bits(numbers * _GOLDEN + seed)


def row_keys(keys: Tensor, dims: Sequence[DimPart]) -> Tensor:
    """Return a key for each row of each sample: keys (B,) and all dimensions of a sample but the last -> (B, ...)."""
    rows = keys.view(-1, *(1,) * len(dims))
    if not dims:
        return mix_bits(rows + _GOLDEN)
    for index, dim in enumerate(dims):  # one at a time, so that the size of a dimension (with padding) has no effect
        positions = _positions(dim, keys.device).view(-1, *(1,) * (len(dims) - 1 - index))
        rows = mix_bits(rows + (positions + 1) * _GOLDEN)
    return rows


def keep_mask(rows: Tensor, dim: DimPart, p: float) -> Tensor:
    """Return which elements are kept: keys of rows (...) and the last dimension -> bool (..., local elements)."""
    parts: list[Tensor] = []
    for piece in dim.pieces:
        words = torch.arange(piece.start // _LANES, -(-piece.stop // _LANES), device=rows.device)
        bits = mix_bits(rows[..., None] + (words + 1) * _GOLDEN).view(torch.int16)
        parts.append(bits.narrow(-1, piece.start % _LANES, len(piece)))
    bits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return bits >= _dropped_levels(p) - _LEVELS // 2


def dropped_share(p: float) -> float:
    """Return the fraction of dropped elements: p, rounded to a multiple of 1 / 65536."""
    return _dropped_levels(p) / _LEVELS


def _dropped_levels(p: float) -> int:
    return round(p * _LEVELS)


def _positions(dim: DimPart, device: torch.device) -> Tensor:
    pieces = [torch.arange(piece.start, piece.stop, device=device) for piece in dim.pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
