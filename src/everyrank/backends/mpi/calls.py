"""Tensors as MPI buffers, and polling of MPI requests.

MPI reduces neither half precision nor bool. Half precision is converted to float32 for the reduction and rounded once
at the end. For bool, a sum is a logical "or" and a product a logical "and". Operations that only copy take any dtype,
because MPI gets its bits as a dtype of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps

__all__ = [
    "UNFINISHED",
    "Calls",
    "contiguous",
    "copy_out",
    "receive_buffers_for",
    "to_reducible_dtype",
    "without_overlap",
]

_REDUCIBLE_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
# dtypes for copies, by element size in bytes
_COPY_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MPI_TYPES = {
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
_BOOL_REDUCTIONS = {"sum": "BOR", "max": "BOR", "product": "BAND", "min": "BAND"}

UNFINISHED: list[Any] = []
"""(request, buffers) of abandoned calls. MPI may still write into these buffers, so they must stay alive."""


class Calls:
    """Makes MPI buffers from tensors, and polls MPI requests, for the collectives and messages of a communicator."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self.mpi, self.communicator = mpi, communicator

    def until_done(self, request: Any, missing: list[int], buffers: Any, status: Any = None) -> Steps:
        """Poll a request until it is done; meanwhile the steps yield `missing`, the awaited ranks.

        `buffers` is the memory that the request reads and writes; it is kept alive if the steps are abandoned. Raises
        `RuntimeError` for an error of MPI.
        """
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
                UNFINISHED.append((request, buffers))

    def byte_buffer(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return an MPI buffer for copies of tensors that are adjacent in memory. Its dtype has only the same size."""
        return self._buffer(tensors, _COPY_DTYPES[tensors[0].itemsize])

    def typed_buffer(self, tensor: Tensor) -> list[Any]:
        """Return an MPI buffer of the tensor with its dtype, for reductions."""
        return self._buffer([tensor], torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)

    def operation(self, reduction: str, dtype: torch.dtype) -> Any:
        """Return MPI's operation for a reduction. Raises `RuntimeError` if MPI does not support it for this dtype."""
        name = (_BOOL_REDUCTIONS if dtype is torch.bool else {}).get(reduction) or _REDUCTIONS.get(reduction)
        is_number = dtype.is_floating_point or dtype.is_complex
        if (
            name is None
            or (is_number and name in ("BAND", "BOR", "BXOR"))
            or (reduction == "avg" and not is_number)  # the sum could not be divided in place
            or (dtype.is_complex and name in ("MIN", "MAX"))
        ):
            raise RuntimeError(
                f"reduction {reduction} of {dtype}: MPI does not support it; give one of {', '.join(_REDUCTIONS)}"
            )
        if _REDUCIBLE_DTYPES.get(dtype, dtype) not in _MPI_TYPES and dtype is not torch.bool:
            raise RuntimeError(f"{dtype}: MPI cannot reduce it; give another dtype")
        return getattr(self.mpi, name)

    def _buffer(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Any]:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        memory = self.mpi.buffer.fromaddress(tensors[0].data_ptr(), num_bytes)
        return [memory, getattr(self.mpi, _MPI_TYPES[dtype])]


def to_reducible_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that MPI can reduce: the tensor itself, or a float32 copy of half precision."""
    return tensor.to(_REDUCIBLE_DTYPES.get(tensor.dtype, tensor.dtype))


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors lie one after the other in memory, without gaps."""
    return all(first.data_ptr() + first.nbytes == second.data_ptr() for first, second in pairwise(tensors))


def receive_buffers_for(outputs: list[Tensor]) -> list[Tensor]:
    """Return adjacent tensors to receive `outputs`: themselves if they are adjacent, otherwise one new tensor for all.

    `copy_out` then copies the received values to the outputs.
    """
    if not outputs or _are_adjacent(outputs):
        return outputs
    return [outputs[0].new_empty(sum(output.numel() for output in outputs))]


def copy_out(receive_buffers: list[Tensor], outputs: list[Tensor]) -> None:
    """Copy received values to `outputs`, unless they were received there. `receive_buffers_for` made the buffers."""
    if receive_buffers is not outputs:
        lengths = [output.numel() for output in outputs]
        for output, values in zip(outputs, receive_buffers[0].split(lengths), strict=True):
            output.copy_(values)


def _overlap(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether the tensor shares memory with one of the others."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(other.data_ptr() < last and first < other.data_ptr() + other.nbytes for other in others)


def without_overlap(tensor: Tensor, receive_buffers: list[Tensor]) -> Tensor:
    """Return the tensor, or a copy if it overlaps the buffers: MPI must not read memory that it writes."""
    return tensor.clone() if _overlap(tensor, receive_buffers) else tensor


def contiguous(inputs: list[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs as adjacent tensors that do not overlap `outputs`: themselves, or one tensor with a copy."""
    if not inputs or (_are_adjacent(inputs) and not any(_overlap(output, inputs) for output in outputs)):
        return inputs
    return [torch.cat(inputs)]
