"""Masks out of integers: which elements of a tensor are kept is a hash of where they stand in it.

A generator that draws one number after the other gives another mask to every other way of cutting a tensor. Here
nothing is drawn. A key of 64 bits says which mask it is; with the number of a row (of each dimension but the last, one
after the other) it becomes the key of that row; and with the number of a word in the row it becomes 64 bits, which
decide about four elements next to each other, 16 bits each:

    key of call and sample --+ row--> key of the row --+ word--> 64 bits: 16 16 16 16
                                                                 element 4w .. 4w + 3 is kept if its 16 bits are >= p

Each step is the finaliser of splitmix64 over key + number * constant: a counter of splitmix64 that begins at the key.
That takes integer additions, products, shifts and xors, which wrap: the same bits on every device, compiled or not.

Source: Steele, Lea and Flood 2014 (splitmix64); Salmon et al. 2011 (generators that are functions of a counter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DimPart", "dropped_share", "keep_mask", "mix_bits", "row_keys", "sample_keys", "whole_dim"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed numbers: the bits are what counts
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_LANES = 4  # elements of a word
_LEVELS = 1 << 16  # that an element's bits can have


@dataclass(frozen=True)
class DimPart:
    """What this rank has of one dimension of a tensor: positions, in pieces, of the `size` that all ranks have."""

    pieces: tuple[range, ...]
    size: int


def whole_dim(size: int) -> DimPart:
    """All of a dimension."""
    return DimPart((range(size),), size)


def mix_bits(state: Tensor) -> Tensor:
    """The finaliser of splitmix64: int64 -> int64, of any shape. `state` is overwritten."""
    state ^= (state >> 30) & ((1 << 34) - 1)  # torch shifts copies of the sign in; the mask takes them out
    state *= _FIRST
    state ^= (state >> 27) & ((1 << 37) - 1)
    state *= _SECOND
    state ^= (state >> 31) & ((1 << 33) - 1)
    return state


def sample_keys(seed: int, places: Sequence[int], device: torch.device) -> Tensor:
    """A key for each sample, by its place in the update: int64, (B,)."""
    if isinstance(places, range):  # made on the device: nothing is waited for
        numbers = torch.arange(places.start, places.stop, places.step, device=device)
    else:
        numbers = torch.tensor(list(places), device=device)
    return mix_bits(numbers * _GOLDEN + seed)


def row_keys(keys: Tensor, dims: Sequence[DimPart]) -> Tensor:
    """A key for each row of each sample: (B,) and the dimensions of a sample but the last -> (B, ...)."""
    rows = keys.view(-1, *(1,) * len(dims))
    if not dims:
        return mix_bits(rows + _GOLDEN)
    for index, dim in enumerate(dims):  # one after the other: the size of a dimension, padding too, must not count
        positions = _positions(dim, keys.device).view(-1, *(1,) * (len(dims) - 1 - index))
        rows = mix_bits(rows + (positions + 1) * _GOLDEN)
    return rows


def keep_mask(rows: Tensor, dim: DimPart, p: float) -> Tensor:
    """Which elements are kept: keys of rows (...), and the last dimension -> bool (..., its elements that are here)."""
    parts: list[Tensor] = []
    for piece in dim.pieces:
        words = torch.arange(piece.start // _LANES, -(-piece.stop // _LANES), device=rows.device)
        bits = mix_bits(rows[..., None] + (words + 1) * _GOLDEN).view(torch.int16)
        parts.append(bits.narrow(-1, piece.start % _LANES, len(piece)))
    bits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return bits >= _dropped_levels(p) - _LEVELS // 2


def dropped_share(p: float) -> float:
    """Which part of all elements is dropped: p, rounded to a whole number of 65536ths."""
    return _dropped_levels(p) / _LEVELS


def _dropped_levels(p: float) -> int:
    return round(p * _LEVELS)


def _positions(dim: DimPart, device: torch.device) -> Tensor:
    pieces = [torch.arange(piece.start, piece.stop, device=device) for piece in dim.pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
