"""Contiguous parts of the sequences of a batch, for own parallel code: its attention reaches over the ranks itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import UnsupportedLayoutError
from everyrank.parallel.mesh import Mesh
from everyrank.workload import Workload

__all__ = ["SequenceParts", "sequence_parts"]


@dataclasses.dataclass
class SequenceParts:
    """The part of every sequence that this rank has: `index` of `count` contiguous ones along dimension `dim`.

    length   of this rank's part, once a batch has been taken
    """

    dim: int
    index: int
    count: int
    group: dist.ProcessGroup | None
    length: int = 0

    @property
    def pieces(self) -> tuple[range, ...]:
        """Which positions of the whole sequence this rank has."""
        return (range(self.index * self.length, (self.index + 1) * self.length),)

    def take(self, batch: Batch) -> Batch:
        """The rank's part of the sequences of a batch: of every tensor as long as those of the input.

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

        def part(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != lengths[0]:
                return tensor
            return tensor.narrow(self.dim, self.index * self.length, self.length)

        return dataclasses.replace(batch, input=map_tensors(batch.input, part), target=map_tensors(batch.target, part))

    def gather_output(self, output: Any) -> Any:
        """An output of all ranks' parts, put together along the sequence. A collective."""

        def gathered(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.length:
                return tensor
            rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.count)]
            dist.all_gather(rows, tensor.contiguous(), group=self.group)
            return torch.cat(rows, dim=self.dim)

        return map_tensors(output, gathered)

    def check(self) -> None:
        """Nothing to check after a forward pass: what attention does is the person's own."""


def sequence_parts(workload: Workload, mesh: Mesh) -> SequenceParts | None:
    """How sequences are cut over the context axis; None where that is one rank long.

    Raises `UnsupportedLayoutError` for a workload that does not say which dimension is the sequence.
    """
    count = mesh.size("context")
    if count == 1:
        return None
    if workload.sequence_dim is None:
        raise UnsupportedLayoutError(
            f"workload {workload.name} has no sequence_dim, which says which dimension of the input is the sequence; "
            "for tokens of shape (B, T) it is 1"
        )
    return SequenceParts(workload.sequence_dim, mesh.coordinate["context"], count, mesh.group("context"))
