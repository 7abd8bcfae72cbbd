"""Memory as MPI takes it, and asking until a call is done.

MPI reduces no half precision and no bool: the first is widened to float32 and rounded once, of the second a sum is "or"
and a product "and". What is only moved travels as bits of its size, in any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps

__all__ = ["UNFINISHED", "Calls", "apart", "hand_out", "joined", "room_for", "widened"]

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_MOVED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by bytes
_TYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_REDUCTIONS = {
    "sum": "SUM",
    "avg": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_OF_BOOL = {"sum": "BOR", "max": "BOR", "product": "BAND", "min": "BAND"}

UNFINISHED: list[Any] = []
"""Calls that were given up. MPI may still write into their memory, so that is kept."""


class Calls:
    """What collectives and messages have in common: buffers as MPI takes them, and asking until a call is done."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self.mpi, self.communicator = mpi, communicator

    def until_done(self, request: Any, missing: list[int], memory: Any, status: Any = None) -> Steps:
        """Raises `RuntimeError` for what MPI says. `memory` is what it reads and writes until then."""
        is_done = False
        try:
            while not is_done:
                is_done = request.Test(status)
                if not is_done:
                    yield missing
        except self.mpi.Exception as error:
            is_done = True
            raise RuntimeError(f"MPI: {error.Get_error_string()}") from None
        finally:
            if not is_done:
                UNFINISHED.append((request, memory))

    def moved(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Tensors that lie one after the other in memory, as bits that are only moved."""
        return self._buffer(tensors, _MOVED[tensors[0].itemsize])

    def reduced(self, tensor: Tensor) -> list[Any]:
        """A tensor that MPI computes with."""
        return self._buffer([tensor], torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)

    def operation(self, reduction: str, dtype: torch.dtype) -> Any:
        """MPI's. Raises `RuntimeError`, at once, for a reduction or dtype that it does not have."""
        name = (_OF_BOOL if dtype is torch.bool else {}).get(reduction) or _REDUCTIONS.get(reduction)
        is_number = dtype.is_floating_point or dtype.is_complex
        if (
            name is None
            or (is_number and name in ("BAND", "BOR", "BXOR"))
            or (dtype.is_complex and name in ("MIN", "MAX"))
        ):
            raise RuntimeError(f"reduction {reduction} of {dtype}: MPI has none; give one of {', '.join(_REDUCTIONS)}")
        if _WIDER.get(dtype, dtype) not in _TYPES and dtype is not torch.bool:
            raise RuntimeError(f"{dtype}: MPI cannot reduce it; give another dtype")
        return getattr(self.mpi, name)

    def _buffer(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Any]:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        memory = self.mpi.buffer.fromaddress(tensors[0].data_ptr(), num_bytes)
        return [memory, getattr(self.mpi, _TYPES[dtype])]


def widened(tensor: Tensor) -> Tensor:
    """The tensor, in a dtype that MPI computes with."""
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    return all(first.data_ptr() + first.nbytes == second.data_ptr() for first, second in pairwise(parts))


def room_for(parts: list[Tensor]) -> list[Tensor]:
    """`parts` where they lie one after the other in memory, else a tensor for all of them."""
    if not parts or _are_adjacent(parts):
        return parts
    return [parts[0].new_empty(sum(chunk.numel() for chunk in parts))]


def hand_out(whole: list[Tensor], parts: list[Tensor]) -> None:
    """Into `parts`, from what `room_for` gave for them."""
    if whole is not parts:
        for output, values in zip(parts, whole[0].split([output.numel() for output in parts]), strict=True):
            output.copy_(values)


def _overlap(tensor: Tensor, parts: Sequence[Tensor]) -> bool:
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(other.data_ptr() < last and first < other.data_ptr() + other.nbytes for other in parts)


def apart(tensor: Tensor, whole: list[Tensor]) -> Tensor:
    """`own`, or a copy where it lies in `whole`: MPI reads no memory that it also writes."""
    return tensor.clone() if _overlap(tensor, whole) else tensor


def joined(parts: list[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """`parts` in one chunk of memory, which is not that of `written`."""
    if not parts or (_are_adjacent(parts) and not any(_overlap(tensor, parts) for tensor in written)):
        return parts
    return [torch.cat(parts)]
