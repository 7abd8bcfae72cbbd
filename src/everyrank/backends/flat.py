"""Tensors as transports take them: in one dimension, contiguous; and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everyrank.backends.lane import Steps

__all__ = ["Outputs", "check_alike", "flattened", "split_rows"]


class Outputs:
    """Outputs that are not contiguous: filled in a copy, and copied back at the end."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def out(self, tensor: Tensor) -> Tensor:
        """`tensor`, flat, to be written into."""
        flat = flattened(tensor)
        if not tensor.is_contiguous():
            self.copies.append((tensor.data, flat))
        return flat

    def after(self, steps: Steps) -> Steps:
        """`steps`, and then the copies back."""
        return self._then_copies(steps) if self.copies else steps

    def _then_copies(self, steps: Steps) -> Steps:
        value = yield from steps
        for tensor, flat in self.copies:
            tensor.copy_(flat.view(tensor.shape))
        return value


def flattened(tensor: Tensor) -> Tensor:
    """All elements in one dimension: a view where that can be, outside autograd. Raises `RuntimeError`."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise RuntimeError(f"a {tensor.layout} tensor on {tensor.device}: this backend moves dense tensors on the CPU")
    data = tensor.data if tensor.is_contiguous() else tensor.data.contiguous()
    if data.dim() == 1 and data.stride(0) == 1:
        return data
    return data.as_strided((data.numel(),), (1,))  # one element is contiguous whatever its stride is


def split_rows(flat: Tensor, tensor: Tensor, rows: Sequence[int], num_ranks: int) -> list[Tensor]:
    """The part for each rank; `rows` along dimension 0, equal ones where it is empty."""
    if not rows:
        if len(tensor) % num_ranks:
            raise RuntimeError(f"all_to_all_single: {len(tensor)} rows make no equal parts for {num_ranks} ranks")
        return list(flat.split(max(1, len(flat) // num_ranks))) if len(flat) else [flat] * num_ranks
    row = len(flat) // max(1, len(tensor))
    return list(flat.split([count * row for count in rows]))


def check_alike(operation: str, parts: Sequence[Tensor], own: Tensor, count: int) -> None:
    """Raises `RuntimeError` for parts that are not `count` tensors of the length and dtype of `own`."""
    if len(parts) != count:
        raise RuntimeError(f"{operation}: {len(parts)} tensors for {count} ranks: give one for each")
    for part in parts:
        if part.nbytes != own.nbytes or part.dtype != own.dtype:
            raise RuntimeError(
                f"{operation}: a tensor of {len(part)} {part.dtype} beside one of {len(own)} {own.dtype}: "
                "all ranks' tensors are alike"
            )
