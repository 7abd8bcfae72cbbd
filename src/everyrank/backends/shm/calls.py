"""Encodes a call as one integer: ranks compare their calls before one reads what another one has written."""

from __future__ import annotations

import functools

import torch

__all__ = ["decode_call", "encode_call"]

_REDUCTIONS = ("none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "barrier"),
)
_DTYPES = tuple(dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype)))
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


@functools.lru_cache(maxsize=4096)
def encode_call(operation: str, dtype: torch.dtype, count: int, reduction: str = "none", root: int = 0) -> int:
    """Return a call as an integer of 63 bits. Raises `RuntimeError` for an unsupported reduction of this dtype.

    From the lowest bit on: operation (4 bits), dtype (6), reduction (4), root (12), number of elements (36).
    """
    if reduction != "none":
        _check_reduction(reduction, dtype)
    code = _OPERATIONS.index(operation) | _DTYPE_NUMBERS[dtype] << 4 | _REDUCTIONS.index(reduction) << 10
    return code | root << 14 | (count & 0xFFFFFFFFF) << 26


def decode_call(call: int) -> str:
    """Return an encoded call as text, for example `all_reduce(8 elements of float32, sum, root 0)`."""
    dtype, reduction = _DTYPES[call >> 4 & 63], _REDUCTIONS[call >> 10 & 15]
    arguments = [f"{call >> 26} elements of {str(dtype).removeprefix('torch.')}"]
    arguments += [reduction] if reduction != "none" else []
    return f"{_OPERATIONS[call & 15]}({', '.join(arguments)}, root {call >> 14 & 4095})"


def _check_reduction(reduction: str, dtype: torch.dtype) -> None:
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if reduction not in _REDUCTIONS or (
        (reduction in ("band", "bor", "bxor") and not is_integer)
        or (reduction in ("min", "max") and dtype.is_complex)
        or (reduction == "avg" and is_integer)
    ):
        raise RuntimeError(
            f"reduction {reduction} of {dtype} is not supported; give one of {', '.join(_REDUCTIONS[1:])} that this "
            "dtype has"
        )
