"""One call of an operation: what each rank hands in, how it is called, and what each must get."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Call", "Case", "Operation", "writing_call"]


@dataclass(frozen=True)
class Case:
    """What an operation is tried with.

    rank, size   within the group
    group        the process group; None: all ranks
    length       elements of the tensor that a rank hands in, or gets, whichever is larger
    dtype, device, reduction, algorithm, is_async
    memory       how tensors lie in memory: "contiguous", "strided" or "transposed"
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    length: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (it cannot be changed)
    reduction: str = "sum"
    algorithm: str | None = None
    is_async: bool = False
    memory: str = "contiguous"

    def values(self, rank: int, length: int | None = None) -> Tensor:
        """What a rank hands in: ones and twos for a product, else 1 to 7; another pattern for each rank."""
        return self._repeated(self._pattern(rank).to(self.dtype), length)

    def empty(self, length: int | None = None) -> Tensor:
        """A tensor to be written into, with a number that no answer has."""
        return self._repeated(torch.full((1,), -1, dtype=self.dtype, device=self.device), length)

    def part(self, rank: int) -> slice:
        """The part of `length` that belongs to a rank, where all parts are equal."""
        share = self.length // self.size
        return slice(rank * share, (rank + 1) * share)

    @property
    def op(self) -> Any:
        """The reduction as torch has it."""
        return getattr(dist.ReduceOp, self.reduction.upper())

    def reduced(self) -> Tensor:
        """The reduction of what all ranks hand in, in float64 or int64, rounded to the dtype at the end."""
        wide = torch.float64 if self.dtype.is_floating_point else torch.int64
        rows = [self._pattern(rank).to(wide) for rank in range(self.size)]
        result = functools.reduce(_COMBINE[self.reduction], rows)
        return self._repeated((result / self.size if self.reduction == "avg" else result).to(self.dtype), None)

    def _pattern(self, rank: int) -> Tensor:
        """What `values` repeats."""
        top = 2 if self.reduction == "product" else 7
        return (torch.arange(top, device=self.device) * (2 * rank + 1) + rank) % top + 1

    def _repeated(self, pattern: Tensor, length: int | None) -> Tensor:
        """The pattern again and again: shape (length,), or (length, 2) where it is transposed.

        Between strided elements lie others, which nobody is to write or to send; a transposed tensor fills its memory,
        in the order of columns.
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
    """An operation that is ready to be called.

    run     once; waits until it is done, however it was called
    reset   puts back what a call overwrites; not timed
    wrong   elements that differ from the right answer, after a call
    """

    run: Callable[[], None]
    reset: Callable[[], None]
    wrong: Callable[[], int]


@dataclass(frozen=True)
class Operation:
    """One row of `OPERATIONS`.

    make          (case) -> Call
    bus_factor    (ranks) -> bus bandwidth as a multiple of bytes / time, by the definitions of the NCCL tests: what a
                  link carries, so that different operations and numbers of ranks can be compared
    has_async     whether it can be called with async_op=True
    multiple      (ranks) -> what the length is a multiple of, where the tensor has a part for each rank
    has_size      whether there is a size at all: not of a barrier
    least_ranks   1 where a rank can do it alone
    has_tensors   whether tensors are what it carries: not of a barrier, nor of objects
    """

    make: Callable[[Case], Call]
    bus_factor: Callable[[int], float] = lambda _: 1.0
    has_async: bool = True
    multiple: Callable[[int], int] = lambda _: 1
    has_size: bool = True
    least_ranks: int = 1
    has_tensors: bool = True


def writing_call(
    case: Case, start: Callable[[bool], Any], written: Tensor, initial: Tensor, right: Tensor | None
) -> Call:
    """A call that writes one tensor; `right` is None on ranks whose tensor may come to anything."""

    def run() -> None:
        work = start(case.is_async)
        if work is not None:
            work.wait()

    def wrong() -> int:
        return 0 if right is None else int((written != right).sum())

    return Call(run, lambda: _copy(written, initial), wrong)


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source)
