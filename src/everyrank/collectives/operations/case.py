"""One call of an operation: the input of each rank, the call, and the expected result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Call", "Case", "Operation", "writing_call"]

_LARGEST = 7  # value of an element, except for a product


@dataclass(frozen=True)
class Case:
    """The parameters of a call.

    rank, size   within the group
    group        the process group; None: all ranks
    length       elements of the input or output tensor of a rank, whichever is larger
    dtype, device, reduction, algorithm, is_async
    memory       memory layout of the tensors: "contiguous", "strided" or "transposed"
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    length: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (torch.device is immutable)
    reduction: str = "sum"
    algorithm: str | None = None
    is_async: bool = False
    memory: str = "contiguous"

    def values(self, rank: int, length: int | None = None) -> Tensor:
        """Return the input of a rank: 1 and 2 for a product, else 1 to 7, in a different pattern for each rank.

        If a sum over so many ranks would be rounded, only every `_stride`-th element is not 0.
        """
        return self._repeated(self._pattern(rank).to(self.dtype), length)

    def empty(self, length: int | None = None) -> Tensor:
        """Return an output tensor, filled with a value that no result has."""
        return self._repeated(torch.full((1,), -1, dtype=self.dtype, device=self.device), length)

    def rank_slice(self, rank: int) -> slice:
        """Return the slice of `length` that belongs to a rank, if all parts are equal."""
        part_length = self.length // self.size
        return slice(rank * part_length, (rank + 1) * part_length)

    @property
    def op(self) -> Any:
        """The `torch.distributed.ReduceOp`."""
        return getattr(dist.ReduceOp, self.reduction.upper())

    def reduced(self) -> Tensor:
        """Return the reduction of the inputs of all ranks, in float64 or int64, rounded to the dtype at the end."""
        wide_dtype = torch.float64 if self.dtype.is_floating_point else torch.int64
        rows = [self._pattern(rank).to(wide_dtype) for rank in range(self.size)]
        result = functools.reduce(_COMBINE[self.reduction], rows)
        return self._repeated((result / self.size if self.reduction == "avg" else result).to(self.dtype), None)

    def _pattern(self, rank: int) -> Tensor:
        """Return the values that `values` repeats."""
        period = 2 if self.reduction == "product" else _LARGEST
        index = torch.arange(period * self._stride, device=self.device)
        pattern = (index * (2 * rank + 1) + rank) % period + 1
        return pattern.where((index + rank) % self._stride == 0, 0)

    @property
    def _stride(self) -> int:
        """One of so many ranks contributes to an element of a sum, so that the sum is exact in the dtype."""
        if self.reduction not in ("sum", "avg") or not self.dtype.is_floating_point:
            return 1
        largest_exact_integer = round(2 / torch.finfo(self.dtype).eps)
        return -(-self.size // (largest_exact_integer // _LARGEST))

    def _repeated(self, pattern: Tensor, length: int | None) -> Tensor:
        """Repeat the pattern: shape (length,), or (length, 2) if transposed.

        Between strided elements are other values, which must not be written or sent. A transposed tensor fills its
        memory in column order.
        """
        length = self.length if length is None else length
        row = pattern.repeat(-(-length // len(pattern)))[:length]
        if self.memory == "strided":
            return torch.stack([row, torch.full_like(row, -2)], dim=1)[:, 0]
        if self.memory == "transposed":
            return torch.stack([row, row.roll(1)]).t()
        return row


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Call:
    """A prepared operation.

    run     calls it and waits until it is done
    reset   restores the tensors that a call overwrites; not timed
    wrong   returns the number of wrong elements after a call
    """

    run: Callable[[], None]
    reset: Callable[[], None]
    wrong: Callable[[], int]


@dataclass(frozen=True)
class Operation:
    """One row of `OPERATIONS`.

    make          (case) -> Call
    bus_factor    (ranks) -> bus bandwidth as a multiple of bytes / time, as defined by the NCCL tests, so that
                  different operations and numbers of ranks can be compared
    has_async     whether it can be called with async_op=True
    multiple      (ranks) -> divisor of the length, for tensors with a part for each rank
    has_size      whether it has a size; a barrier has none
    least_ranks   minimum number of ranks
    has_tensors   whether it sends tensors; a barrier and operations on objects do not
    """

    make: Callable[[Case], Call]
    bus_factor: Callable[[int], float] = lambda _: 1.0
    has_async: bool = True
    multiple: Callable[[int], int] = lambda _: 1
    has_size: bool = True
    least_ranks: int = 1
    has_tensors: bool = True


def writing_call(
    case: Case, start: Callable[[bool], Any], written: Tensor, initial: Tensor, expected: Tensor | None
) -> Call:
    """Return a call that writes one tensor; `expected` is None on ranks whose result is undefined."""

    def run() -> None:
        work = start(case.is_async)
        if work is not None:
            work.wait()

    def num_wrong() -> int:
        return 0 if expected is None else int((written != expected).sum())

    return Call(run, lambda: _copy(written, initial), num_wrong)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
