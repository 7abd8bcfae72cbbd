"""Parts of the sequences of a batch, for a custom parallelize function with its own distributed attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import LayoutError, UnsupportedLayoutError
from everyrank.parallel.mesh import Mesh
from everyrank.workload import Workload

__all__ = ["SequenceParts", "sequence_parts"]


@dataclasses.dataclass
class SequenceParts:
    """The part of every sequence that this rank has: `index` of `count` equal parts along `dim`.

    length     positions of this rank, known after the first batch
    order      (whole length, count) -> all positions, beginning with the first part; None: contiguous parts
    is_whole   batches are passed on whole, and the user's code selects its part
    """

    dim: int
    index: int
    count: int
    group: dist.ProcessGroup | None
    length: int = 0
    order: Callable[[int, int], Sequence[int]] | None = None
    is_whole: bool = False

    @property
    def local_positions(self) -> tuple[range, ...]:
        """Return the positions of this rank in the whole sequence, as contiguous ranges in its order."""
        return _runs(self._positions()[self.index * self.length : (self.index + 1) * self.length])

    def _positions(self) -> list[int]:
        """Return all positions, beginning with the first part. Raises `LayoutError` for an invalid order."""
        length = self.count * self.length
        if self.order is None:
            return list(range(length))
        positions = [int(position) for position in self.order(length, self.count)]
        if sorted(positions) != list(range(length)):
            raise LayoutError(
                f"contract: positions({length}, {self.count}) gives {len(positions)} numbers, which are not each of "
                f"the positions 0 to {length - 1} once"
            )
        return positions

    def take(self, batch: Batch) -> Batch:
        """Return this rank's part of the sequences of a batch: of every tensor as long as the input.

        Raises `UnsupportedLayoutError` for a length that does not divide.
        """
        lengths: list[int] = []
        map_tensors(batch.input, lambda t: lengths.append(t.shape[self.dim]) or t if t.dim() > self.dim else t)
        if not lengths:
            raise UnsupportedLayoutError(f"sequence_dim={self.dim}: no tensor of the input has such a dimension")
        if lengths[0] % self.count:
            raise UnsupportedLayoutError(
                f"a sequence of {lengths[0]} does not divide into {self.count} parts, one for each rank that reads a "
                "part of it; pad it to a multiple"
            )
        self.length = lengths[0] // self.count
        positions = self._positions()
        if self.is_whole:
            return batch
        start = self.index * self.length
        own_positions = None if self.order is None else torch.tensor(positions[start : start + self.length])

        def local_part(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != lengths[0]:
                return tensor
            if own_positions is not None:
                return tensor.index_select(self.dim, own_positions.to(tensor.device))
            return tensor.narrow(self.dim, start, self.length)

        return dataclasses.replace(
            batch, input=map_tensors(batch.input, local_part), target=map_tensors(batch.target, local_part)
        )

    def gather_output(self, output: Any) -> Any:
        """Gather an output along the sequence from all ranks. A collective."""

        def gathered(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.length:
                return tensor
            rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.count)]
            dist.all_gather(rows, tensor.contiguous(), group=self.group)
            whole = torch.cat(rows, dim=self.dim)
            return whole if back is None else whole.index_select(self.dim, back.to(whole.device))

        back = None if self.order is None else torch.tensor(self._positions()).argsort()
        return map_tensors(output, gathered)

    def check(self) -> None:
        """Do nothing, because attention is the user's code."""


def _runs(positions: Sequence[int]) -> tuple[range, ...]:
    """Return positions as contiguous ranges: [0, 1, 6, 7] -> (range(0, 2), range(6, 8))."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return tuple(runs)


def sequence_parts(
    workload: Workload,
    mesh: Mesh,
    order: Callable[[int, int], Sequence[int]] | None = None,
    is_whole: bool = False,
) -> SequenceParts | None:
    """Return how sequences are split over the context axis; None if the axis has one rank.

    `order` and `is_whole` are those of `SequenceParts`.

    Raises `UnsupportedLayoutError` for a workload without `sequence_dim`.
    """
    count = mesh.size("context")
    if count == 1:
        return None
    if workload.sequence_dim is None:
        raise UnsupportedLayoutError(
            f"workload {workload.name} has no sequence_dim, the dimension of the input that is the sequence; "
            "for tokens of shape (B, T) it is 1"
        )
    index = mesh.coordinate["context"]
    return SequenceParts(workload.sequence_dim, index, count, mesh.group("context"), order=order, is_whole=is_whole)
