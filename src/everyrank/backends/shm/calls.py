"""What a rank calls, as one number: ranks compare theirs before one reads what another has written."""

from __future__ import annotations

import functools

import torch

__all__ = ["call_text", "encode_call"]

_REDUCTIONS = ("none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "barrier"),
)
_DTYPES = tuple(dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype)))
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


@functools.lru_cache(maxsize=4096)
def encode_call(operation: str, dtype: torch.dtype, count: int, reduction: str = "none", root: int = 0) -> int:
    """A call in 63 bits. Raises `RuntimeError` for a reduction that this backend has not, or not of this dtype."""
    if reduction != "none":
        _check_reduction(reduction, dtype)
    number = _OPERATIONS.index(operation) | _DTYPE_NUMBERS[dtype] << 4 | _REDUCTIONS.index(reduction) << 10
    return number | root << 14 | (count & 0xFFFFFFFFF) << 26


def call_text(call: int) -> str:
    """The call for a person: `all_reduce(8 elements of float32, sum, root 0)`."""
    dtype, reduction = _DTYPES[call >> 4 & 63], _REDUCTIONS[call >> 10 & 15]
    words = [f"{call >> 26} elements of {str(dtype).removeprefix('torch.')}"]
    words += [reduction] if reduction != "none" else []
    return f"{_OPERATIONS[call & 15]}({', '.join(words)}, root {call >> 14 & 4095})"


def _check_reduction(reduction: str, dtype: torch.dtype) -> None:
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if reduction not in _REDUCTIONS or (
        (reduction in ("band", "bor", "bxor") and not is_whole)
        or (reduction in ("min", "max") and dtype.is_complex)
        or (reduction == "avg" and is_whole)
    ):
        raise RuntimeError(f"reduction {reduction} of {dtype}: give one of {', '.join(_REDUCTIONS[1:])} that it has")
